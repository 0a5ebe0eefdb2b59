"""`hookimpl` marks an implementation, `hookspec` a specification."""

from __future__ import annotations

import pluggy

PROJECT = "retrograd"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
