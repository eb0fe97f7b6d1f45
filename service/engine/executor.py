"""The device: loads a checkpoint, compiles the programs, holds parameters and state.

The only file of the service that imports JAX. All methods run on the engine thread; programs run on
the device in the order of the calls, so nothing here waits but `_Call.fetch`.
"""
# pyright: basic

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model import checkpoint as checkpoint_lib
from model import memory_plan
from model import programs as programs_lib
from model import self_test as self_test_lib
from model import slots as slots_lib
from model.config import ModelConfig
from model.costs import replay_bytes
from model.logits import MAX_LOGIT_BIAS, LogitSettings
from model.sampling import SamplingSettings
from model.state import NO_LIMIT, CallInputs, DecodeShape, SlotSettings, init_inputs, init_state
from model.transformer import Transformer
from model.weight_layouts import layout_of
from service.engine.types import (
    NOTHING_CONSTRAINED,
    DecodeHandle,
    FinishReason,
    Limits,
    Request,
    ScoreHandle,
    SlotRounds,
    TokenMasks,
    TopTokens,
)
from service.model_card import read_json
from service.startup import StartupLog, megabytes

MAX_STOP_IDS = 16

_log = logging.getLogger(__name__)


class JaxExecutor:
    """Executor (see `types.Executor`) over one device."""

    def __init__(
        self,
        model: Transformer,
        shape: DecodeShape,
        *,
        prefill_chunk: int,
        kv_dtype: str | None = None,
        planned_bytes: int = 0,
    ):
        """Puts the parameters and an empty state on the device; compiles nothing yet.

        Args:
          model: parameters, in the dtype that they are used in.
          shape: what the decode program is compiled for.
          prefill_chunk: tokens per prefill call.
          kv_dtype: of keys and values; unset: that of the parameters.
          planned_bytes: what the memory plan says of all this.
        """
        self.planned_bytes = planned_bytes
        self._shape = shape
        self._config = model.config
        self._buckets = _prefill_buckets(prefill_chunk)
        self._prefill_chunk = prefill_chunk
        self._leaves, self._treedef = jax.tree.flatten(model)
        self._dtype = str(model.norm.weight.dtype)
        self._kv_dtype = kv_dtype or self._dtype
        self._state: Any = self._empty_state()
        self._vocab_size = shape.addressable_tokens

        self._programs = programs_lib.build(self._treedef, shape, jax.default_backend())
        self._inputs = init_inputs(shape, model.config.vocab_size)
        self._page_table = np.zeros((shape.slots, self.limits.pages_per_slot), np.int32)
        self._top_logprobs = [0] * shape.slots  # what the request of each slot asked for

    @property
    def limits(self) -> Limits:
        """The fixed shapes of the programs."""
        shape = self._shape
        return Limits(
            slots=shape.slots,
            max_context=shape.max_context,
            vocab_size=self._vocab_size,
            draft_length=shape.draft_length,
            rounds_per_call=shape.rounds,
            page_size=shape.page_size,
            pages=shape.pages,
            prefill_chunk=self._prefill_chunk,
            max_stop_ids=shape.max_stop_ids,
            speculation_bytes_per_slot=replay_bytes(self._config, shape.draft_length),
        )

    def self_test(self, *, strict: bool = False, log: StartupLog | None = None) -> None:
        """Checks every kernel on this device; one that is wrong gives way to its plain form.

        Args:
          strict: refuse instead.
          log: hears of the stage.

        Raises:
          model.self_test.SelfTestError: nothing can stand in for a wrong kernel.
        """
        outcomes = self_test_lib.run(
            self._config,
            dtype=self._dtype,
            kv_dtype=self._kv_dtype,
            page_size=self._shape.page_size,
            strict=strict,
        )
        wrong = [outcome for outcome in outcomes if not outcome.passed]
        for outcome in wrong:
            _log.error("self-test: %s; its plain form is used, which is slower", outcome)
        if wrong:
            off = frozenset(outcome.kernel for outcome in wrong)
            backend = jax.default_backend()
            self._programs = programs_lib.build(self._treedef, self._shape, backend, off)
        if log is not None:
            log.stage(
                f"self-test: {len(outcomes) - len(wrong)} of {len(outcomes)} kernels are right"
            )

    def warm_up(self, *, single_program: bool = False, log: StartupLog | None = None) -> None:
        """Compiles and runs every program once, with all writes going to the sink page.

        Args:
          single_program: decode calls will be of the full draft length only (strict mode).
          log: hears of each program.
        """
        request = Request(request_id="warm-up", prompt_ids=(0, 0), max_tokens=1)
        longest = self._shape.draft_length
        runs: dict[str, Callable[[], object]] = {
            f"prefill, {bucket} tokens": partial(self.prefill, 0, (), 0, (0,) * bucket, 0)
            for bucket in self._buckets
        }
        runs |= {
            f"scored prefill of {bucket} tokens": partial(
                self.prefill, 0, (), 0, (0,) * bucket, 0, score=True
            )
            for bucket in self._buckets
        }
        runs |= {
            "insert": partial(self.insert, 0, request, 0),
            "set_draft_cap": partial(self.set_draft_cap, 0, 0),
            "release": partial(self.release, 0),
        }
        runs |= {
            f"decode, draft length {draft_length}": partial(self._decode_nothing, draft_length)
            for draft_length in range(longest if single_program else 0, longest + 1)
        }
        log = log or StartupLog()
        for number, (name, run) in enumerate(runs.items(), 1):
            with _CacheWatch() as watch:
                run()
                self.wait()
            log.program(name, number, len(runs), cached=watch.cached)

    def reset(self) -> None:
        """See `types.Executor.reset`."""
        self._state = None  # first: there may be no room for two
        self._state = self._empty_state()
        self._decode_nothing(self._shape.draft_length)

    def compile_counts(self) -> dict[str, int]:
        """How often each program was compiled so far; constant after `warm_up`."""
        counts = {}
        for name, program in self._programs.items():
            counts[name] = program._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
        return counts

    def prefill(
        self,
        slot: int,
        page_ids: Sequence[int],
        start: int,
        tokens: Sequence[int],
        next_token: int,
        score: bool = False,
    ) -> ScoreHandle | None:
        """See `types.Executor.prefill`."""
        bucket = next(size for size in self._buckets if size >= len(tokens))
        padded = np.zeros(bucket, np.int32)
        padded[: len(tokens)] = tokens
        scores = self._run(
            "score" if score else "prefill", np.int32(slot), padded, np.int32(len(tokens)),
            np.int32(start), np.int32(next_token), self._page_row(page_ids),
        )  # fmt: skip
        return _Scores(scores, len(tokens)) if score else None

    def insert(self, slot: int, request: Request, draft_cap: int) -> None:
        """See `types.Executor.insert`."""
        insertion = slots_lib.Insertion(
            last_token=_scalar(request.prompt_ids[-1], np.int32),
            position=_scalar(len(request.prompt_ids) - 1, np.int32),
            budget=_scalar(request.max_tokens, np.int32),
            reasoning_left=_scalar(_reasoning_left(request), np.int32),
            settings=_settings(request, draft_cap, self._shape),
        )
        self._top_logprobs[slot] = request.top_logprobs
        self._run("insert", np.int32(slot), insertion)

    def release(self, slot: int) -> None:
        """See `types.Executor.release`."""
        self._run("release", np.int32(slot))

    def set_draft_cap(self, slot: int, draft_cap: int) -> None:
        """See `types.Executor.set_draft_cap`."""
        self._run("set_draft_cap", np.int32(slot), np.int32(draft_cap))

    def decode(
        self,
        page_tables: Sequence[Sequence[int]],
        draft_length: int,
        allowed: Mapping[int, TokenMasks] = NOTHING_CONSTRAINED,
        held: Collection[int] = (),
    ) -> DecodeHandle:
        """See `types.Executor.decode`."""
        page_table = np.stack([self._page_row(page_ids) for page_ids in page_tables])
        if not np.array_equal(page_table, self._page_table):
            self._page_table = page_table
            self._inputs = dataclasses.replace(self._inputs, page_table_BM=jnp.asarray(page_table))
        inputs = self._constrained(allowed, held) if allowed or held else self._inputs
        packed, top = self._run("decode", inputs, draft_length)
        packed.copy_to_host_async()
        wanted = tuple(self._top_logprobs)
        if any(wanted):
            top.copy_to_host_async()
        return _Call(packed, top, wanted, self._shape.draft_length)

    def _constrained(self, allowed: Mapping[int, TokenMasks], held: Collection[int]) -> CallInputs:
        """The inputs of a call in which some slots are not free."""
        rounds_B = np.full(self._shape.slots, self._shape.rounds, np.int32)
        constrained_B = np.zeros(self._shape.slots, np.bool_)
        allowed_BTW = np.zeros(self._inputs.allowed_BTW.shape, np.uint32)
        for slot, masks in allowed.items():
            rounds_B[slot], constrained_B[slot] = 1, True
            for position, mask in enumerate(masks):
                row = np.frombuffer(mask, np.uint8)
                allowed_BTW[slot, position].view(np.uint8)[: len(row)] = row
        rounds_B[list(held)] = 0
        return dataclasses.replace(
            self._inputs,
            rounds_B=jnp.asarray(rounds_B),
            constrained_B=jnp.asarray(constrained_B),
            allowed_BTW=jnp.asarray(allowed_BTW),
        )

    def wait(self) -> None:
        """See `types.Executor.wait`."""
        jax.block_until_ready(self._state.pending_B)

    def peak_bytes(self) -> int | None:
        """The most device memory that was held so far; None where the device does not tell."""
        return _device_memory("peak_bytes_in_use")

    def _empty_state(self) -> Any:
        return init_state(self._config, self._shape, self._kv_dtype)

    def _decode_nothing(self, draft_length: int) -> None:
        self.decode([()] * self._shape.slots, draft_length).fetch()

    def _page_row(self, page_ids: Sequence[int]) -> np.ndarray:
        row = np.zeros(self.limits.pages_per_slot, np.int32)
        row[: len(page_ids)] = page_ids
        return row

    def _run(self, name: str, *args: Any) -> Any:
        """Runs a program on the state, which it donates and replaces."""
        model = (self._leaves,) if name in ("decode", "prefill", "score") else ()
        result = self._programs[name](*model, self._state, *args)
        if name in ("decode", "score"):
            self._state, result = result
            return result
        self._state = result
        return None


def _settings(request: Request, draft_cap: int, shape: DecodeShape) -> SlotSettings:
    """A request's settings as the device holds them for one slot."""
    watched = [(token, FinishReason.END_OF_SEQUENCE) for token in request.end_ids]
    watched += [(token, FinishReason.STOP) for token in request.stop_ids]
    sampling, bias = request.sampling, request.sampling.logit_bias
    return SlotSettings(
        sampling=SamplingSettings(
            temperature=_scalar(sampling.temperature, np.float32),
            top_k=_scalar(sampling.top_k, np.int32),
            top_p=_scalar(sampling.top_p, np.float32),
            min_p=_scalar(sampling.min_p, np.float32),
            seed=_scalar(sampling.seed, np.uint32),
        ),
        logits=LogitSettings(
            bias_ids_BX=_padded([token for token, _ in bias], MAX_LOGIT_BIAS, -1, np.int32),
            bias_BX=_padded([value for _, value in bias], MAX_LOGIT_BIAS, 0, np.float32),
            repetition_B=_scalar(sampling.repetition_penalty, np.float32),
            frequency_B=_scalar(sampling.frequency_penalty, np.float32),
            presence_B=_scalar(sampling.presence_penalty, np.float32),
            stop_ids_BX=_padded([token for token, _ in watched], shape.max_stop_ids, -1, np.int32),
            stop_budget_B=_scalar(request.max_tokens - request.min_tokens, np.int32),
            reasoning_end_B=_scalar(
                -1 if request.reasoning_end is None else request.reasoning_end, np.int32
            ),
        ),
        stop_reasons_BX=_padded(
            [int(reason) for _, reason in watched], shape.max_stop_ids, 0, np.int32
        ),
        draft_cap_B=_scalar(draft_cap, np.int32),
        logprobs_B=_scalar(request.logprobs, np.bool_),
        top_logprobs_B=_scalar(request.top_logprobs, np.int32),
    )


def _reasoning_left(request: Request) -> int:
    if request.reasoning_end is None or request.max_reasoning_tokens is None:
        return NO_LIMIT
    return min(request.max_reasoning_tokens, NO_LIMIT - 1)


def _scalar(value: float, dtype: Any) -> Any:
    """A host scalar: `jit` takes it as it is, without a transfer of its own."""
    return np.asarray(value, dtype)


def _padded(values: Sequence[float], length: int, filler: int, dtype: Any) -> Any:
    row = np.full(length, filler, dtype)
    row[: len(values)] = values
    return row


@dataclasses.dataclass(frozen=True)
class _Scores:
    """A scored prefill chunk in flight."""

    scores_T: jax.Array
    count: int

    def fetch(self) -> Sequence[float]:
        return np.asarray(self.scores_T)[: self.count].tolist()


@dataclasses.dataclass(frozen=True)
class _Call:
    """A decode call in flight: its packed output (see `decode.decode_rounds`)."""

    packed_OBY: jax.Array
    top_OBTN: jax.Array
    top_logprobs: tuple[int, ...]
    """How many each slot wants."""
    draft_length: int

    def fetch(self) -> Sequence[SlotRounds]:
        packed_OBY = np.ascontiguousarray(np.asarray(self.packed_OBY))
        return [self._slot(slot, packed_OBY[:, slot]) for slot in range(packed_OBY.shape[1])]

    def _slot(self, slot: int, packed_OY: np.ndarray) -> SlotRounds:
        width, drafts = self.draft_length + 1, self.draft_length
        emitted, drafted, accepted, finish, ahead = packed_OY[:, 2 * width + drafts :].T.tolist()
        tokens = packed_OY[:, :width].tolist()
        logprobs = packed_OY[:, width : 2 * width].view(np.float32).tolist()
        return SlotRounds(
            tokens=[row[:count] for row, count in zip(tokens, emitted, strict=True)],
            logprobs=[row[:count] for row, count in zip(logprobs, emitted, strict=True)],
            drafted=drafted,
            accepted=accepted,
            finish=FinishReason(max(finish)),
            top_logprobs=self._top(slot, emitted) if self.top_logprobs[slot] else (),
            next_drafts=packed_OY[-1, 2 * width : 2 * width + ahead[-1]].tolist(),
        )

    def _top(self, slot: int, emitted: list[int]) -> list[list[TopTokens]]:
        """Per round and emitted token."""
        top_OTN, wanted = np.asarray(self.top_OBTN)[:, slot], self.top_logprobs[slot]
        count = top_OTN.shape[2] // 2
        ids = top_OTN[..., :wanted].tolist()
        values = top_OTN[..., count : count + wanted].copy().view(np.float32).tolist()
        return [
            [tuple(zip(ids[o][t], values[o][t], strict=True)) for t in range(emitted[o])]
            for o in range(len(emitted))
        ]


def load_executor(
    checkpoint: pathlib.Path,
    *,
    slots: int,
    max_context: int | None,
    page_size: int,
    pages: int | None,
    draft_length: int,
    rounds_per_call: int,
    prefill_chunk: int,
    dtype: str,
    kv_dtype: str | None = None,
    addressable_tokens: int | None = None,
    usable_bytes: int | None = None,
    log: StartupLog | None = None,
) -> JaxExecutor:
    """Loads a checkpoint and builds an executor for it.

    Args:
      checkpoint: directory with config.json, tokenizer.json and safetensors, or its Orbax form.
      slots: requests that decode together.
      max_context: tokens a slot may hold; None takes the model's maximum.
      page_size: positions per page.
      pages: pages of the KV caches for all slots together; None: all that the slots could fill, or
        as many of them as fit.
      draft_length: U; without an MTP head drafting is off whatever this says.
      rounds_per_call: O.
      prefill_chunk: tokens per prefill call.
      dtype: "float32" or "bfloat16", of parameters.
      kv_dtype: of keys and values; None: that of the parameters.
      addressable_tokens: ids from here on name no token and are never chosen; None: all rows of the
        output head do.
      usable_bytes: memory that may be used; None: what the device has, where it tells.
      log: hears of each stage.

    Raises:
      model.memory_plan.DoesNotFitError: before anything is loaded, with the plan as a table.
      ValueError: too few pages for one request of full length.
      model.checkpoint.CheckpointError: listing all that is wrong with the tensors.
      model.config.ConfigError: naming the fields that cannot be served.
    """
    log = log or StartupLog()
    hf_config = read_json(checkpoint / checkpoint_lib.CONFIG_FILE)
    config = ModelConfig.from_hf(hf_config)
    context = min(max_context or config.max_position_embeddings, config.max_position_embeddings)
    pages_per_slot = -(-context // page_size)
    if pages is not None and pages < pages_per_slot:
        raise ValueError(
            f"pages is {pages}, must be at least {pages_per_slot}: one request of {context} tokens"
            f" fills as many pages of {page_size}"
        )
    shape = DecodeShape(
        slots=slots,
        draft_length=draft_length if config.mtp_num_hidden_layers else 0,
        rounds=rounds_per_call,
        max_context=context,
        pages=1 + (pages or slots * pages_per_slot),
        page_size=page_size,
        max_stop_ids=MAX_STOP_IDS,
        addressable_tokens=min(addressable_tokens or config.vocab_size, config.vocab_size),
    )
    wanted = shape.pages
    shape, plan = memory_plan.fit(
        config,
        shape,
        min(filter(None, (usable_bytes, _device_memory("bytes_limit"))), default=None),
        all_pages=pages is not None,
        layout=layout_of(hf_config, dtype),
        kv_dtype=kv_dtype or dtype,
        prefill_chunk=prefill_chunk,
    )
    log.stage(
        f"memory planned: {plan.summary()}, {shape.pages - 1} pages of {page_size} tokens each"
    )
    if shape.pages < wanted:
        _log.warning(
            "memory: %d of the %d pages that the slots could fill", shape.pages - 1, wanted - 1
        )
    loaded = checkpoint_lib.load(checkpoint, jnp.dtype(dtype), log.progress)
    read = loaded.stored_bytes
    log.stage(f"checkpoint read, {megabytes(read)} in {checkpoint}", read)
    for notice in loaded.notices:
        _log.warning("%s", notice)
    if loaded.model.mtp is None:
        shape = dataclasses.replace(shape, draft_length=0)
    elif not shape.draft_length:
        loaded.model.mtp = None  # nothing reads it: its memory is free again
    executor = JaxExecutor(
        loaded.model,
        shape,
        prefill_chunk=prefill_chunk,
        kv_dtype=kv_dtype,
        planned_bytes=plan.total,
    )
    leaves = jax.block_until_ready(jax.tree.leaves(loaded.model))
    executor.wait()
    held = megabytes(sum(leaf.nbytes for leaf in leaves))
    log.stage(f"parameters and an empty state are on the device, {held} in {dtype}")
    return executor


def _device_memory(figure: str) -> int | None:
    """One of the device's own figures; None where it has none, as on the CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get(figure)


def use_compilation_cache(directory: pathlib.Path) -> None:
    """Keeps compiled programs in a directory, for this process and later ones.

    Call it before anything is compiled. Programs are kept by what they compute, compiler, options
    and machine, so servers of different kinds may share a directory. One that cannot be read or
    written costs a warning and the compiling.
    """
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # All of them: by default programs that compile in less than a second are left out.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class _CacheWatch:
    """Listens whether programs come from the compilation cache, for the length of a block."""

    def __init__(self) -> None:
        self._requests = self._hits = 0

    @property
    def cached(self) -> bool:
        """Whether something was compiled in the block, and all of it came from the cache."""
        return 0 < self._requests == self._hits

    def __enter__(self) -> _CacheWatch:
        jax.monitoring.register_event_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._listen)

    def _listen(self, event: str, **_: str | int) -> None:
        self._requests += event == "/jax/compilation_cache/compile_requests_use_cache"
        self._hits += event == "/jax/compilation_cache/cache_hits"


def _prefill_buckets(chunk: int) -> tuple[int, ...]:
    """Compiled prefill lengths: a short tail should not cost a whole chunk.

    The length used follows from the prompt alone, so the bits of a reply do not depend on company.
    """
    return tuple(sorted({max(2, chunk // 8), chunk}))
