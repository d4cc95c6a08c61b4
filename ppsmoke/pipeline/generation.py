"""What the exit keeps of a request: the tokens so far, when to stop, and where the time went. Reads no clock."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ppsmoke.pipeline.messages import FinishReason, InferenceResponse


@dataclass
class Generation:
    """One request's answer as it grows. max_tokens is already clipped to the context; eog: the end-of-generation ids.

    token_ids holds the end-of-generation token too, as llama.cpp's own list does, and it counts for max_tokens; the
    text does not show it.
    """

    request_id: int
    reply_to: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    eog: Collection[int]
    began_s: float  # when the first chunk was here, less what earlier stages had computed for it
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    _token_us: list[int] = field(default_factory=list)
    _stage_us: list[list[int]] = field(default_factory=list)
    _step_us: list[int] = field(default_factory=list)

    def computed(self, compute_us: Sequence[int]) -> None:
        """Each stage has computed this long, in microseconds, for the present step; a prefill's chunks add up."""
        if not self._step_us:
            self._step_us = list(compute_us)
        else:
            self._step_us = [sum(pair) for pair in zip(self._step_us, compute_us, strict=True)]

    def sampled(self, token_id: int, now_s: float) -> FinishReason | None:
        """Take the step's token, at now_s on the clock of began_s. Why the answer ends with it, or None to go on."""
        passed_us = sum(self._token_us)
        self._token_us.append(max(0, round((now_s - self.began_s) * 1e6) - passed_us))
        self._stage_us.append(self._step_us)
        self._step_us = []
        self.token_ids.append(token_id)
        if token_id in self.eog:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason

    @property
    def next_position(self) -> int:
        """Where the newest token will stand in the KV cache."""
        return len(self.prompt_token_ids) + len(self.token_ids) - 1

    def text_token_ids(self) -> list[int]:
        """What the answer's text is made of: all but an end-of-generation token at its end."""
        return self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids

    def response(self, text: str) -> InferenceResponse:
        """The finished answer."""
        return InferenceResponse(
            request_id=self.request_id,
            finish_reason=self.finish_reason or "length",
            token_ids=tuple(self.token_ids),
            prompt_token_ids=self.prompt_token_ids,
            text=text,
            timings_json=json.dumps(self.timings(), separators=(",", ":")),
        )

    def timings(self) -> dict[str, object]:
        """token_us[i]: wall time of token i at the exit, since token i - 1; the first one's is prefill_us, counted from
        the first chunk's arrival plus what earlier stages computed for it. stage_us[i]: what each stage computed in
        that step. No two machines' clocks are compared, and the wire's share is the difference."""
        prefill_us = self._token_us[0] if self._token_us else None
        return {"prefill_us": prefill_us, "token_us": self._token_us, "stage_us": self._stage_us}
