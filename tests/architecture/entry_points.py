"""The entry-point table as it follows from the modules on disk.

`python tests/architecture/entry_points.py` rewrites the table in pyproject.toml; the test beside this
file asserts that the two agree. A module registers components of the kind that its folder names;
its entry is called like the module, a kernel's with its backend in front.
"""

from __future__ import annotations

from pathlib import Path

import tomlkit

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins" / "retrograd_plugins"


def modules_on_disk() -> dict[str, dict[str, str]]:
    """Group -> entry name -> module, for every public module of the built-in plugins."""
    table: dict[str, dict[str, str]] = {}
    for path in sorted(PLUGINS.rglob("*.py")):
        parts = path.relative_to(PLUGINS).with_suffix("").parts
        if len(parts) < 2 or any(part.startswith("_") for part in parts):
            continue
        kind, *rest = parts
        module = ".".join(("retrograd_plugins", *parts))
        table.setdefault(f"retrograd.{kind}", {})[".".join(rest)] = module
    return table


def main() -> None:
    path = ROOT / "pyproject.toml"
    document = tomlkit.parse(path.read_text())
    project = document["project"]
    groups = tomlkit.table(is_super_table=True)
    for group, entries in modules_on_disk().items():
        table = tomlkit.table()
        for name, module in entries.items():
            table.add(name if "." not in name else tomlkit.key([name]), module)
        groups.add(tomlkit.key([group]), table)
    project["entry-points"] = groups  # type: ignore[index]
    text = tomlkit.dumps(document).replace("[tool.hatch.build", "\n[tool.hatch.build", 1)
    path.write_text(text.replace("\n\n\n", "\n\n"))


if __name__ == "__main__":
    main()
