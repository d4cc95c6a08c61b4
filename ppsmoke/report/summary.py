"""What a run is known to have done so far, as the JSON object of `--json` and as a few lines for a person."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppsmoke.errors import SmokeError
from ppsmoke.report.told import timings_of

SCHEMA = 1
_STAGE_FIELDS = ("stage", "blocks", "device", "weight_bytes", "bytes_read", "load_s", "warmup_s", "peak_rss_bytes")


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank); None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def _p50_p99(values: Sequence[float]) -> dict[str, float | None]:
    return {"p50": _rounded(percentile(values, 50)), "p99": _rounded(percentile(values, 99))}


@dataclass
class RunRecord:
    """Filled as the run goes; whatever is not known stays None or empty. Times in seconds unless the name says ms."""

    run_id: str | None  # None: it was refused before it became a run
    model_name: str | None
    num_stages: int
    log_path: str | None = None
    answer: Any = None  # pipeline.messages.InferenceResponse
    timings: Mapping[str, Any] = field(default_factory=dict)  # prefill_us, token_us, stage_us; see InferenceResponse
    stage_info: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # the workers' ready lines
    phases_s: dict[str, float] = field(default_factory=dict)
    total_s: float | None = None
    links: list[dict[str, Any]] = field(default_factory=list)
    rentals: list[dict[str, Any]] = field(default_factory=list)  # rent.rentals.Rental.to_json; none on loopback
    error: SmokeError | None = None

    def take_answer(self, answer: Any) -> None:
        """Keep an InferenceResponse and what it tells of time. Raises nothing: odd timings count as unknown."""
        self.answer = answer
        self.timings = timings_of(answer.timings_json)

    def token_ms(self) -> list[float]:
        """Wall time of each decode step at the exit; the first token, which is prefill's, left out."""
        return [us / 1e3 for us in self.timings.get("token_us", [])[1:]]

    @property
    def cost_usd(self) -> float:
        """What everything rented has cost so far, at most; the service's own bill counts some of it a little later."""
        return sum(rental["usd"] for rental in self.rentals)

    def still_rented(self) -> list[int]:
        """Instances that are not confirmed as ended."""
        return [rental["instance_id"] for rental in self.rentals if rental["ended"] is None]

    def _wire_ms(self) -> list[float]:
        """A token's time less the stages' compute of that step; no clock is compared across machines."""
        steps = zip(self.timings.get("token_us", [])[1:], self.timings.get("stage_us", [])[1:], strict=False)
        return [max(0.0, (token - sum(stages)) / 1e3) for token, stages in steps]

    def _timing_json(self) -> dict[str, Any]:
        token_ms, stage_us = self.token_ms(), self.timings.get("stage_us", [])[1:]
        decode_s = sum(token_ms) / 1e3 if token_ms else None
        prefill_us = self.timings.get("prefill_us")
        return {
            "total_s": _rounded(self.total_s),
            "phases": {phase: round(seconds, 3) for phase, seconds in self.phases_s.items()},
            "prefill_s": _rounded(None if prefill_us is None else prefill_us / 1e6, 6),
            "decode_s": _rounded(decode_s, 6),
            "decode_tokens_per_s": _rounded(len(token_ms) / decode_s if decode_s else None),
            "token_ms": _p50_p99(token_ms),
            "stage_ms": [_rounded(percentile([us / 1e3 for us in one], 50)) for one in zip(*stage_us, strict=False)],
            "wire_ms": _p50_p99(self._wire_ms()),
        }

    def to_json(self) -> dict[str, Any]:
        """The object of `--json`; unknown values are None, on failure `error` is added. A contract for scripts."""
        known = next(iter(self.stage_info.values()), {})
        model = known.get("model", {})
        answer = self.answer
        out: dict[str, Any] = {
            "schema": SCHEMA,
            "run_id": self.run_id,
            "ok": self.error is None and answer is not None,
            "text": answer.text if answer else None,
            "prompt_token_ids": list(answer.prompt_token_ids) if answer else None,
            "token_ids": list(answer.token_ids) if answer else None,
            "finish_reason": answer.finish_reason if answer else None,
            "model": {
                "name": self.model_name,
                "sha256": model.get("sha256"),
                "blocks": known.get("total_blocks"),
                "context": known.get("context"),
            },
            "stages": [
                {name: self.stage_info.get(stage, {}).get(name) for name in _STAGE_FIELDS} | {"stage": stage}
                for stage in range(self.num_stages)
            ],
            "timing": self._timing_json(),
            "links": self.links,
            "rentals": self.rentals,
            "cost_usd": round(self.cost_usd, 6),
            "log_path": self.log_path,
        }
        if self.error is not None:
            out["error"] = self.error.to_json()
        return out

    def lines(self) -> list[str]:
        """Where the time went, for a person: three lines at most."""
        if self.answer is None:
            return []
        timing = self._timing_json()
        count = len(self.answer.token_ids)
        out = [f"{count} tokens ({self.answer.finish_reason}) after a prompt of {len(self.answer.prompt_token_ids)}"]
        if timing["prefill_s"] is not None:
            out[0] += f"; prefill {timing['prefill_s']:.2f} s"
        if timing["decode_tokens_per_s"]:
            out[0] += f", decode {timing['decode_tokens_per_s']:.1f} tokens/s"
            stages = " + ".join("?" if ms is None else f"{ms:.1f}" for ms in timing["stage_ms"])
            out.append(
                f"a token takes {timing['token_ms']['p50']:.1f} ms (p99 {timing['token_ms']['p99']:.1f}): "
                f"stages {stages} ms, wire {timing['wire_ms']['p50']:.1f} ms"
            )
        out.append(", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.phases_s.items()))
        if self.rentals:
            out.append(f"{len(self.rentals)} machines rented, ${self.cost_usd:.4f} at most")
        return out
