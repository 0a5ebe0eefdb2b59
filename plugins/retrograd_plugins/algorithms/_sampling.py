"""How answers are drawn: `[ppo.sampling]` and `[grpo.sampling]`."""

from __future__ import annotations

import attrs

from retrograd_hookspecs import SamplingParams, key


@attrs.frozen(kw_only=True)
class SamplingConfig:
    """How answers are drawn."""

    temperature: float = key(above=0.0, doc="Divides the logits.")
    top_p: float = key(
        above=0.0, maximum=1.0, doc="Smallest probability mass of the tokens that are drawn from."
    )
    max_new_tokens: int = key(minimum=1, unit="tokens", doc="Longest answer.")
    seed: int = key(minimum=0, doc="Seed of all draws.")

    def params(self) -> SamplingParams:
        """As the sampler takes it."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
        )


@attrs.frozen(kw_only=True)
class NeutralSamplingConfig(SamplingConfig):
    """How answers are drawn: from the model's own distribution, which the objective assumes."""

    temperature: float = key(doc="Must be 1.0.")
    top_p: float = key(doc="Must be 1.0.")

    @temperature.validator
    def _check_temperature(self, attribute: object, value: float) -> None:
        if value != 1.0:
            raise ValueError(f"must be 1.0, got {value:g}: the objective needs the model's own distribution")

    @top_p.validator
    def _check_top_p(self, attribute: object, value: float) -> None:
        if value != 1.0:
            raise ValueError(f"must be 1.0, got {value:g}: the objective needs the model's own distribution")
