"""A stage's part of a model: its blocks with their KV cache, the embedding or the head, compiled steps.

Tokens or hidden states in, hidden states or a token out, as numpy arrays. Knows nothing of JSON, files or peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor, UOp

from ppsmoke.errors import InputError
from ppsmoke.worker import kernel_options
from ppsmoke.worker.compiled import Compiled, copy_in, copy_out
from ppsmoke.worker.gguf import ByteSource, Gguf
from ppsmoke.worker.kernel_store import KernelStore
from ppsmoke.worker.llama import Block, LlamaConfig, Shared, layer_range, multiply, rms_norm, rope_tables, run_block
from ppsmoke.worker.weights import Embedding, PackedRows, Placement, Progress, Reader, Rows, load_block, stage_tensors

CHUNK_CPU, CHUNK_GPU = 32, 128  # positions a prefill step computes at once


class ContextFull(ValueError):
    """The positions asked for reach beyond the context."""


class NotNumbers(ValueError):
    """The computation gave NaN: no token can be chosen."""


class WrongPosition(ValueError):
    """The position is not the number of tokens in the KV cache."""


@dataclass(frozen=True)
class Head:
    """The last stage's end: norm, and the matrix that gives logits."""

    norm: Tensor
    output: Tensor


class StageModel:
    """The blocks [from, to) and what stands before or after them. One request at a time; reset() begins the next."""

    def __init__(
        self,
        config: LlamaConfig,
        blocks_range: tuple[int, int],
        *,
        context: int,
        place: Placement,
        blocks: list[Block],
        shared: Shared,
        embedding: Callable[[Sequence[int]], np.ndarray] | None,
        head: Head | None,
    ) -> None:
        self.config = config
        self.blocks_range = blocks_range
        self.context = context
        self.chunk = chunk_of(place)
        self.device = place.device
        self.length = 0  # tokens in the KV cache
        self.weight_bytes = place.weight_bytes + (embedding.nbytes if embedding is not None else 0)
        self._embedding = embedding
        store = KernelStore.from_environment()
        self._head = _HeadStep(config, head, place, store) if head is not None else None
        # On the CPU all blocks share one compiled block: compiling costs seconds of Python, a call 0.05 ms. On a GPU
        # the whole stage is one graph, because a graph's launch is what costs there.
        group = 1 if place.on_cpu else len(blocks)
        limit = cache_length(context, self.chunk)
        self._decode = _BlockSteps(config, blocks, shared, place, tokens=1, length=limit, group=group, store=store)
        self._prefill = _BlockSteps(
            config, blocks, shared, place, tokens=self.chunk, length=limit, group=group, store=store
        )
        self._place = place

    @classmethod
    def load(
        cls,
        source: ByteSource,
        gguf: Gguf,
        *,
        stage: int,
        num_stages: int,
        max_context: int,
        device: str,
        progress: Progress,
    ) -> StageModel:
        """Read, lay out and upload this stage's tensors, and no others. Raises GgufError, InputError or FetchError."""
        config = LlamaConfig.from_gguf(gguf)
        if num_stages > config.blocks:
            raise InputError(
                f"{num_stages} stages for a model of {config.blocks} blocks", hint=f"try --stages {config.blocks}"
            )
        blocks_range = layer_range(config.blocks, stage, num_stages)
        context = min(max_context, config.context)
        place = Placement(device)
        length = cache_length(context, chunk_of(place))
        reader = Reader(source, gguf, stage_tensors(gguf, config, blocks_range), progress)
        divisors = reader.floats("rope_freqs.weight") if "rope_freqs.weight" in gguf.tensors else None
        cosines, sines = rope_tables(config, divisors, length)
        shared = Shared(place.table(cosines), place.table(sines), place.table(np.arange(length, dtype=np.int32)))
        blocks = []
        for block in range(*blocks_range):
            reader.say(f"block {block}")
            blocks.append(load_block(reader, place, config, block, cache_length=length))
        reader.say("embedding and head")
        embedding, head = _load_ends(reader, place, gguf, config, blocks_range)
        reader.say("weights on the device")
        return cls(
            config,
            blocks_range,
            context=context,
            place=place,
            blocks=blocks,
            shared=shared,
            embedding=embedding,
            head=head,
        )

    @property
    def is_first(self) -> bool:
        return self._embedding is not None

    @property
    def is_last(self) -> bool:
        return self._head is not None

    def warm_up(self, *, progress: Progress = lambda what, done, total: None) -> None:
        """Compile every step that a request can need; afterwards nothing is compiled any more."""
        try:
            self._warm_up(progress)
        except kernel_options.KernelOptError:  # an option that does not fit this device or shape: plain kernels
            kernel_options.disable()
            self._warm_up(progress)
        self.reset()

    def _warm_up(self, progress: Progress) -> None:
        steps = [("decode", self._decode), ("prefill", self._prefill)]
        if not self.is_first:  # the other way round, so that two stages that start together share the compiling
            steps.reverse()
        if self._head is not None:
            steps.append(("head", self._head))
        for done, (name, step) in enumerate(steps):
            progress(f"compiling {name}", done, len(steps))
            step.warm_up()
        progress("compiled", len(steps), len(steps))

    def embed(self, token_ids: Sequence[int]) -> np.ndarray:
        """The tokens' rows of the embedding, (tokens, dim) float32. First stage only."""
        assert self._embedding is not None
        return self._embedding(token_ids)

    def forward(self, hidden: np.ndarray, *, position: int) -> np.ndarray:
        """This stage's blocks on (tokens, dim) float32, same shape out; tokens is 1 to `chunk`.

        Raises WrongPosition unless position is the number of tokens in the cache, ContextFull if they do not fit.
        """
        return self._run(hidden, position)

    def forward_and_sample(self, hidden: np.ndarray, *, position: int, sample: bool) -> int | None:
        """The blocks, then (if `sample`) the token with the greatest logit after the last position. Last stage only."""
        assert self._head is not None
        if len(hidden) == 1 and sample:
            self._admit(hidden, position)
            token = self._head(self._decode.run(hidden, position))
        else:
            out = self._run(hidden, position, fetch=sample)
            token = self._head.from_host(out[-1:]) if sample else None
        self.length = position + len(hidden)
        if token is not None and not 0 <= token < self.config.vocabulary:
            raise NotNumbers("the logits are not numbers (NaN): the weights are damaged, or too large for this device")
        return token

    def last_logits(self) -> np.ndarray:
        """The logits behind the last sampled token, (vocabulary,) float32. Last stage only."""
        assert self._head is not None
        return self._head.logits()

    def reset(self) -> None:
        """Forget the request. The cache keeps its bytes: a position is read only after it was written anew."""
        self.length = 0

    def _admit(self, hidden: np.ndarray, position: int) -> None:
        if position != self.length:
            raise WrongPosition(f"position {position}, but {self.length} tokens are in the cache")
        if position + len(hidden) > self.context:
            raise ContextFull(f"positions up to {position + len(hidden)} in a context of {self.context}")

    def _run(self, hidden: np.ndarray, position: int, *, fetch: bool = True) -> np.ndarray:
        self._admit(hidden, position)
        steps = self._decode if len(hidden) == 1 else self._prefill
        out = steps.run(hidden, position)
        self.length = position + len(hidden)
        return copy_out(out)[: len(hidden)] if fetch else hidden[:0]


def cache_length(context: int, chunk: int) -> int:
    """Positions in the cache: a padded chunk that begins anywhere in the context must fit whole."""
    return -(-(context + chunk - 1) // chunk) * chunk


def chunk_of(place: Placement) -> int:
    return CHUNK_CPU if place.on_cpu else CHUNK_GPU


class _BlockSteps:
    """All blocks of a stage for a fixed number of tokens, `group` blocks to a compiled function.

    Two buffers take turns as input and output of a group.
    """

    def __init__(
        self,
        config: LlamaConfig,
        blocks: list[Block],
        shared: Shared,
        place: Placement,
        *,
        tokens: int,
        length: int,
        group: int,
        store: KernelStore,
    ) -> None:
        self._tokens, self._dim = tokens, config.dim
        self._buffers = [place.zeros((tokens, config.dim)) for _ in range(2)]
        self._groups = [
            [tensor for block in blocks[start : start + group] for tensor in block.tensors()]
            for start in range(0, len(blocks), group)
        ]
        # Everything in memory is an argument: what is captured holds no weights, and serves any block of this shape.
        self._shared = [shared.cosines, shared.sines, shared.positions]
        per_block = len(blocks[0].tensors())

        def run_group(x: Tensor, out: Tensor, *rest: Tensor | UOp) -> None:
            *tensors, position = rest
            shared = Shared(*tensors[:3])
            for start in range(3, len(tensors), per_block):
                x = run_block(x, Block(*tensors[start : start + per_block]), shared, config, position)
            out.assign(x).realize()

        what = {"step": "blocks", "device": place.device, "tokens": tokens, "length": length, "group": group}
        what["weights"] = f"{place.weight_dtype} {len(blocks[0].qkv.shape)} {len(blocks[0].ffn_down.shape)}"
        self._compiled = Compiled(
            run_group,
            position_limit=length - tokens,
            store=store,
            what=what | config.shape(),
            bound=len(self._groups) == 1,
        )

    def warm_up(self) -> None:
        self._compiled.warm_up(*self._buffers, *self._shared, *self._groups[0])

    def run(self, hidden: np.ndarray, position: int) -> Tensor:
        """At most `tokens` rows of (., dim), padded with zeros; the tensor holds the result until the next call."""
        x, out = self._buffers
        if len(hidden) < self._tokens:
            hidden = np.concatenate([hidden, np.zeros((self._tokens - len(hidden), self._dim), np.float32)])
        copy_in(x, hidden.astype(np.float32, copy=False))
        for tensors in self._groups:
            self._compiled(x, out, *self._shared, *tensors, position=position)
            x, out = out, x
        return x


class _HeadStep:
    """Norm, logits and argmax of one position, compiled."""

    def __init__(self, config: LlamaConfig, head: Head, place: Placement, store: KernelStore) -> None:
        self._head = head
        self._input = place.zeros((1, config.dim))
        self._logits = place.zeros((config.vocabulary,))
        self._token = place.zeros((1,), dtype="int32")

        # Nothing is returned: a stored step with tensors of its own could clash with this process's.
        def run_head(x: Tensor, norm: Tensor, output: Tensor, logits: Tensor, token: Tensor) -> None:
            computed = multiply(rms_norm(x, norm, config), output).reshape(-1)
            Tensor.realize(logits.assign(computed), token.assign(computed.argmax().reshape(1)))

        what = {"step": "head", "device": place.device, "weights": f"{place.weight_dtype} {len(head.output.shape)}"}
        self._compiled = Compiled(run_head, store=store, what=what | config.shape())

    def warm_up(self) -> None:
        self._compiled.warm_up(self._input, self._head.norm, self._head.output, self._logits, self._token)

    def __call__(self, x: Tensor) -> int:
        self._compiled(x, self._head.norm, self._head.output, self._logits, self._token)
        return int(copy_out(self._token)[0])

    def from_host(self, row: np.ndarray) -> int:
        copy_in(self._input, row)
        return self(self._input)

    def logits(self) -> np.ndarray:
        return copy_out(self._logits)


def _load_ends(
    reader: Reader, place: Placement, gguf: Gguf, config: LlamaConfig, blocks_range: tuple[int, int]
) -> tuple[Callable[[Sequence[int]], np.ndarray] | None, Head | None]:
    """The embedding if these blocks are the first, the head if they are the last."""
    is_first, is_last = blocks_range[0] == 0, blocks_range[1] == config.blocks
    embedding = head = None
    if is_first or (is_last and config.tied):
        raw, info = reader.raw("token_embd.weight"), gguf.tensors["token_embd.weight"]
    if is_first:
        embedding = Embedding(raw, info)
    if is_last:
        rows = [Rows(raw, info) if config.tied else reader.rows("output.weight")]
        if (packed := place.packed(rows)) is not None:
            output = place.packed_matrix(packed)
            embedding = PackedRows(packed) if is_first and config.tied else embedding
        else:
            output = place.matrix(rows)
        head = Head(place.vector(reader.floats("output_norm.weight")), output)
    return embedding, head
