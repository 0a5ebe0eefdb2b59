"""Rollouts of an update in a checkpoint within it, so that a resumed run can record them when it ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import cattrs
import numpy as np
import numpy.typing as npt

from retrograd_hookspecs import Message, Rollout, RolloutGroup, Score


def pack_rollouts(groups: Sequence[RolloutGroup], metrics: Mapping[str, float]) -> npt.NDArray[np.uint8]:
    """Groups and what was measured of them, as UTF-8 JSON (n,). Numbers keep every bit; what a hook put
    into `metadata` and JSON has no form for becomes text."""
    plain = {"groups": [attrs.asdict(group, value_serializer=_plain) for group in groups]}
    text = json.dumps(
        {**plain, "metrics": {name: float(value) for name, value in metrics.items()}}, default=str
    )
    return np.frombuffer(text.encode(), np.uint8)


def unpack_rollouts(packed: npt.NDArray[np.uint8]) -> tuple[list[RolloutGroup], dict[str, float]]:
    """What `pack_rollouts` was given."""
    plain = json.loads(packed.tobytes())
    return [_group(group) for group in plain["groups"]], plain["metrics"]


def _plain(instance: Any, field: Any, value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _group(plain: Mapping[str, Any]) -> RolloutGroup:
    own = {"messages": _messages(plain), "members": [_rollout(member) for member in plain["members"]]}
    return RolloutGroup(**{**plain, **own})


def _rollout(plain: Mapping[str, Any]) -> Rollout:
    judgement, advantage = plain["judgement"], plain["advantage"]
    own = {
        "tokens": np.array(plain["tokens"], np.int32),
        "trained": np.array(plain["trained"], np.bool_),
        "logp": np.array(plain["logp"], np.float64),
        "messages": _messages(plain),
        "reward": cattrs.structure(plain["reward"], Score),
        "judgement": None if judgement is None else cattrs.structure(judgement, Score),
        "advantage": None if advantage is None else np.array(advantage, np.float64),
        "step_rewards": tuple((index, reward) for index, reward in plain["step_rewards"]),
    }
    return Rollout(**{**plain, **own})


def _messages(plain: Mapping[str, Any]) -> tuple[Message, ...]:
    return tuple(cattrs.structure(message, Message) for message in plain["messages"])
