"""Its registration hook fails."""

from retrograd_hookspecs import hookimpl


@hookimpl
def retrograd_losses():
    raise KeyError("no loss today")
