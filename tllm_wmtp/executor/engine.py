"""The engine: pools, scheduler and the two kinds of work, prefill chunks and speculative steps."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import torch

from tllm_wmtp.checkpoint.loader import LoadedModel
from tllm_wmtp.config import EngineConfig, MtpConfig, arm_of
from tllm_wmtp.depth import DepthController
from tllm_wmtp.errors import ConfigError, RequestError, WmtpError
from tllm_wmtp.executor.draft import MtpProposer, NullProposer, Proposer, ring_of
from tllm_wmtp.executor.prefill import prefill_chunk
from tllm_wmtp.executor.prefix import PrefixCache
from tllm_wmtp.executor.request import Phase, Request, Update
from tllm_wmtp.executor.sampler import SamplingState, StepSampler
from tllm_wmtp.executor.scheduler import Scheduler
from tllm_wmtp.executor.speculation import Step, speculative_step
from tllm_wmtp.executor.text import OutputText
from tllm_wmtp.metrics import EngineMetrics, EngineUsage, RequestMetrics, summarise
from tllm_wmtp.models.cache import (
    BlockTables,
    PagedKvPool,
    RecurrentPool,
    available_bytes,
    pool_pages,
)
from tllm_wmtp.models.spec import CacheSpec
from tllm_wmtp.models.states import VerifyStates
from tllm_wmtp.ops.checks import CUDA_MAX_HEAD_DIM
from tllm_wmtp.sampling import Logprobs, SamplingParams
from tllm_wmtp.tree import TreeShape

log = logging.getLogger(__name__)

#: How many of the latest requests an engine's metrics are pooled from.
METRICS_OF_REQUESTS = 256


def as_request_error(error: Exception) -> WmtpError:
    """What a request shows of an error that was not foreseen."""
    if isinstance(error, WmtpError):
        return error
    return RequestError(
        f"{type(error).__name__}: {error}",
        "the step of this request failed",
        "see the log; other requests go on",
    )


def not_finite() -> RequestError:
    return RequestError(
        "logits of NaN or infinity",
        "the next token is the most likely one, and there is none",
        "use dtype='float32', or a checkpoint whose weights are whole",
    )


def check_kernels(caches: CacheSpec, device: torch.device) -> None:
    """Refuses, before anything is allocated, heads that the device's kernels do not serve.

    Raises:
        ConfigError: naming the width.
    """
    widest = max(caches.attention.head_dim, caches.draft.head_dim)
    if device.type == "cuda" and (widest > CUDA_MAX_HEAD_DIM or widest % 16):
        raise ConfigError(
            f"attention heads {widest} wide on {device}",
            f"the CUDA kernels serve multiples of 16 up to {CUDA_MAX_HEAD_DIM}",
            "use device='cpu'",
        )


class Engine:
    """Not thread-safe: one thread submits and steps (:class:`tllm_wmtp.LLM` owns such a thread).

    Args:
        model: what :func:`tllm_wmtp.checkpoint.loader.load_model` returns.
        config: limits; resolved against the model here.
        proposer: stands in for the configured arm's proposer, for tests.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        proposer: Proposer | None = None,
    ):
        caches = model.config.caches
        self.config = config.resolved(model.config.max_position_embeddings)
        self.model, self.arm = model, arm_of(config.speculation)
        self.device = torch.device(config.device)
        check_kernels(caches, self.device)
        dtype = getattr(torch, self.config.dtype)
        kv_dtype = getattr(torch, self.config.kv_cache.dtype)
        slots, page = config.max_batch_size, config.kv_cache.tokens_per_page
        self.proposer = proposer or self._build_proposer(kv_dtype)
        per_request = self.max_seq_len + self.proposer.rows + page
        pages = pool_pages(
            caches,
            config.kv_cache.max_tokens,
            slots * per_request,
            page,
            kv_dtype,
            self.device,
        )
        self.kv = PagedKvPool(caches, pages, page, kv_dtype, self.device)
        self.recurrent = RecurrentPool(caches, slots, dtype, self.device)
        longest = self.kv.pages_for(self.max_seq_len + self.proposer.rows)
        self.tables = BlockTables(slots, longest, self.device)
        self.prefixes = PrefixCache(
            self.kv, self.tables, self.recurrent, self.proposer, self._reuse_bytes()
        )
        self.scheduler = Scheduler(
            self.kv, self.tables, self.recurrent, self.proposer, self.prefixes
        )
        self._ids = itertools.count()
        speculation = self.config.speculation
        #: Chooses each step's depth, if that was asked for.
        self.depths = (
            DepthController(speculation.depth)
            if speculation is not None and speculation.adaptive_depth
            else None
        )
        self._members: list[tuple[Request, int | None]] = []
        self._states: dict[int, VerifyStates] = {}  # of the members, by levels of drafts
        self._latest: deque[RequestMetrics] = deque(maxlen=METRICS_OF_REQUESTS)
        #: The last speculative step, for measurements.
        self.last_step: Step | None = None
        #: The depth of the next steps, 1 to the proposer's, for measurements; None leaves it to
        #: the configuration.
        self.depth_override: int | None = None

    @property
    def max_seq_len(self) -> int:
        if self.config.max_seq_len is None:
            raise RuntimeError("the engine config has not been resolved")
        return self.config.max_seq_len

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_update: Callable[[Update], None] | None = None,
    ) -> Request:
        """Queues a request.

        Raises:
            RequestError: it can never be served; nothing was queued.
        """
        request = self._make_request(list(prompt_ids), params, on_update)
        self._check(request)
        self.scheduler.enqueue(request)
        self._latest.append(request.metrics)
        return request

    def metrics(self) -> EngineMetrics:
        """Of the latest requests, those under way included."""
        return summarise(self._latest)

    def usage(self) -> EngineUsage:
        """What is occupied now."""
        return EngineUsage(
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            max_batch_size=self.config.max_batch_size,
            kv_pages_used=self.kv.pages - self.kv.free_pages - self.prefixes.pages_held(),
            kv_pages=self.kv.pages,
            tokens_per_page=self.kv.tokens_per_page,
            lanes_used=self.proposer.lanes_used,
        )

    def abort(self, request: Request) -> None:
        """Ends a request and takes back what it holds."""
        request.finish("abort")
        self.scheduler.retire()

    def end_all(self, reason: str, error: Exception | None = None) -> None:
        """Ends every request, running or waiting."""
        shown = None if error is None else as_request_error(error)
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            request.finish(reason, shown)
        self.scheduler.retire()

    @torch.inference_mode()
    def step(self) -> bool:
        """One prefill chunk, then one speculative step of all decoding requests.

        A request that fails ends with an error; its neighbours go on. One that finds no page for
        its next rows waits until there are some. Returns whether work is left.
        """
        self.scheduler.admit()
        prefilling = self.scheduler.next_prefill()
        if prefilling is not None:
            self._guarded(prefilling, lambda: self._prefill(prefilling))
        decoding = self.scheduler.decoding()
        if decoding:
            draft_len = self._draft_len(decoding)
            decoding = self.scheduler.reserve(decoding, 1 + self.proposer.tree_width * draft_len)
        if decoding:
            self._decode(decoding, draft_len)
        self.scheduler.retire()
        if not self.scheduler.running:
            self._members, self._states = [], {}  # an idle engine remembers no request
        return self.has_work

    @torch.inference_mode()
    def admit_synthetic(
        self, context_tokens: int, seed: int = 0, max_tokens: int | None = None
    ) -> Request:
        """A request that looks as if ``context_tokens`` tokens had been prefilled, with random keys
        and values, to measure steps without a prefill. It makes ``max_tokens`` tokens (by default
        as many as fit, at most 4096) unless aborted.

        Raises:
            RequestError: no room for it.
        """
        room = self.max_seq_len - context_tokens
        generator = torch.Generator(self.device).manual_seed(seed)
        params = SamplingParams(max_tokens=max_tokens or max(1, min(room, 4096)), ignore_eos=True)
        request = self._make_request([0] * context_tokens, params, None)
        request.text, request.reusable = None, False
        self._check(request)
        if not self.scheduler.can_admit(request):
            raise RequestError(
                f"a synthetic request of {context_tokens} tokens",
                "the engine is occupied by other requests",
                "abort them first, or raise max_batch_size and the KV pool",
            )
        self.scheduler.start(request)
        self.kv.fill_random(request.pages, generator)
        self.recurrent.conv[:, request.slot].uniform_(-1, 1, generator=generator)
        self.recurrent.state[:, request.slot].uniform_(-0.1, 0.1, generator=generator)
        self.proposer.fill_random(request, context_tokens - 1, generator)
        hidden = torch.empty(1, self.model.config.hidden_size, device=self.device)
        request.kv_length = request.prefilled = context_tokens
        hidden = hidden.uniform_(-1, 1, generator=generator).to(self.recurrent.dtype)
        self.proposer.keep(request, [0], hidden)
        request.phase, request.prefill_states = Phase.DECODE, None
        return request

    def _build_proposer(self, kv_dtype: torch.dtype) -> Proposer:
        speculation = self.config.speculation
        if speculation is None:
            return NullProposer(self.device)
        if self.model.head is None:
            raise ConfigError(
                f"speculation {speculation}",
                "the model was loaded without its MTP head",
                "load it with with_head=True",
            )
        vocab = self.model.config.vocab_size
        if speculation.tree_width > vocab:
            raise ConfigError(
                f"tree_width {speculation.tree_width}",
                f"a level's drafts are different tokens, and the vocabulary has {vocab}",
                "lower tree_width",
            )
        lanes = self.config.max_batch_size
        self._check_ring_memory(speculation, lanes, kv_dtype)
        return MtpProposer(
            self.model.target, self.model.head, speculation, lanes, kv_dtype, self.device
        )

    def _reuse_bytes(self) -> int:
        """Most memory that snapshots may take: as told, or enough for two per running request."""
        kv_cache = self.config.kv_cache
        if not kv_cache.enable_block_reuse:
            return 0
        if kv_cache.reuse_bytes is not None:
            return kv_cache.reuse_bytes
        states = self.recurrent.conv.nbytes + self.recurrent.state.nbytes
        rings = self.recurrent.slots * self.proposer.lane_bytes
        return min(max(2 * (states + rings), 64 << 20), available_bytes(self.device) // 8)

    def _check_ring_memory(self, speculation: MtpConfig, lanes: int, kv_dtype: torch.dtype) -> None:
        slots = ring_of(speculation).capacity
        needed = lanes * slots * self.model.config.caches.draft.bytes_per_token(kv_dtype)
        free = available_bytes(self.device)
        if needed > free:
            raise ConfigError(
                f"draft rings of {slots} slots for {lanes} requests",
                f"they take {needed >> 20} MiB and {free >> 20} MiB are free",
                "lower max_batch_size, max_seq_len or the window",
            )

    def _make_request(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        on_update: Callable[[Update], None] | None,
    ) -> Request:
        tokenizer = self.model.tokenizer
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(self.model.eos_token_ids)
        room = self.max_seq_len - len(prompt_ids)
        return Request(
            request_id=next(self._ids),
            prompt_ids=prompt_ids,
            params=params,
            sampling=SamplingState(params, prompt_ids, self.model.config.vocab_size, self.device),
            stop_ids=frozenset(stop_ids),
            max_tokens=min(params.max_tokens, max(room, 0)),
            metrics=RequestMetrics(self.arm, len(prompt_ids), [0] * self.proposer.depth),
            text=None if tokenizer is None else OutputText(tokenizer.decode, params.stop),
            on_update=on_update,
            acceptance=None if self.depths is None else self.depths.new_request(),
        )

    def _check(self, request: Request) -> None:
        length, vocab = len(request.prompt_ids), self.model.config.vocab_size
        if length == 0:
            raise RequestError("an empty prompt", "it needs at least one token", "add one")
        if not all(isinstance(i, int) and 0 <= i < vocab for i in request.prompt_ids):
            bad = next(
                i for i in request.prompt_ids if not isinstance(i, int) or not 0 <= i < vocab
            )
            raise RequestError(
                f"token id {bad!r}",
                f"ids are integers from 0 to {vocab - 1}",
                "use the tokenizer that belongs to this checkpoint",
            )
        if length >= self.max_seq_len:
            raise RequestError(
                f"a prompt of {length} tokens",
                f"max_seq_len is {self.max_seq_len} (prompt and output together), and the model "
                f"has {self.model.config.max_position_embeddings} positions",
                "shorten the prompt, or raise max_seq_len",
            )
        if request.params.stop and request.text is None:
            raise RequestError(
                f"stop {request.params.stop!r}",
                "the checkpoint has no tokenizer.json, so there is no text to search",
                "use stop_token_ids",
            )
        if not self.scheduler.fits(request):
            raise RequestError(
                f"a request of {self.scheduler.tokens_needed(request)} tokens (prompt, output, "
                "one step's drafts)",
                f"the KV pool holds {self.kv.pages * self.kv.tokens_per_page}",
                "shorten it, lower max_tokens, or raise KvCacheConfig(max_tokens=...)",
            )

    def _guarded(self, request: Request, work: Callable[[], None]) -> None:
        """Runs ``work``; if it fails, so does ``request`` and no other."""
        try:
            work()
        except Exception as error:
            log.exception("request %d failed", request.request_id)
            request.finish("error", as_request_error(error))

    def _prefill(self, request: Request) -> None:
        begin = perf_counter()
        resumed = bool(request.output_ids)
        hidden = request.restored_hidden
        if request.prefilled < len(request.context_ids):
            hidden = prefill_chunk(
                self.model.target,
                self.proposer,
                request,
                self.config.prefill_chunk,
                self.config.prefill_pruning,
                self.config.kv_cache.snapshot_interval if self.prefixes.budget_bytes else None,
            )
            if hidden is not None and request.prefilled < len(request.context_ids):
                self.prefixes.keep(request, request.context_ids[: request.prefilled], hidden)
                hidden = None
        if hidden is not None and resumed:
            request.pending = request.output_ids[-1]
            self._begin_decoding(request, hidden)
        elif hidden is not None:
            verdict = StepSampler([request.sampling]).choose(self.model.target.logits(hidden))
            if not verdict.finite.all():
                raise not_finite()
            (tokens,), (logprobs,) = verdict.tokens, verdict.logprobs
            request.pending = tokens[0]
            self._begin_decoding(request, hidden)
            request.metrics.ttft_s = perf_counter() - request.submitted_at
        request.metrics.prefill_s += perf_counter() - begin
        if hidden is not None and not resumed:
            request.emit(tokens, logprobs)
            self.prefixes.keep(request, request.context_ids, hidden)

    def _begin_decoding(self, request: Request, hidden: torch.Tensor) -> None:
        """``hidden [1, H]`` is the last row's, and the pending token is known."""
        self.proposer.keep(request, [request.pending], hidden)
        request.phase, request.prefill_states = Phase.DECODE, None

    def _decode(self, requests: list[Request], draft_len: int) -> None:
        """One step; if it fails, every request takes it again alone, and who fails again ends.

        Until its commit a step changes nothing that its repetition does not write anew: the rows
        that it left in pages and rings lie beyond the lengths that count.
        """
        try:
            self._step_of(requests, draft_len)
        except Exception:
            log.exception(
                "a step of requests %s failed; each takes it again alone",
                [request.request_id for request in requests],
            )
            for request in requests:
                request.sampling.rewind()
                self._guarded(request, partial(self._step_of, [request], draft_len))

    def _step_of(self, requests: list[Request], draft_len: int) -> None:
        states = self._states_of(requests, draft_len)
        step = speculative_step(self.model.target, self.proposer, requests, states, draft_len)
        self.last_step = step
        verdict = step.verdict
        gains = zip(
            requests, verdict.tokens, verdict.logprobs, verdict.finite.tolist(), strict=True
        )
        for request, tokens, logprobs, finite in gains:
            if not finite:
                request.finish("error", not_finite())
                continue
            self._guarded(request, partial(self._record, request, step, tokens, logprobs))
        self._learn(requests, step)

    def _record(
        self, request: Request, step: Step, tokens: list[int], logprobs: Logprobs | None
    ) -> None:
        metrics = request.metrics
        metrics.record_step(
            len(tokens) - 1,
            step.draft_s,
            step.verify_s,
            step.step_s,
            step.draft_len,
            step.extend_s,
        )
        metrics.draft_kv_bytes = self.proposer.kv_bytes(request)
        request.emit(tokens, logprobs)
        if request.finish_reason in ("stop", "length"):
            self._keep_whole(request)

    def _keep_whole(self, request: Request) -> None:
        """A snapshot of all rows of a request that has just ended, for the next turn."""
        if not request.reusable or request.slot is None:
            return
        known = request.prompt_ids + request.output_ids
        # A stop string ends a request at a token after which more may be committed.
        if request.kv_length == len(known) - 1:
            self.prefixes.keep(request, known[:-1], self.proposer.settle(request))

    def _draft_len(self, requests: list[Request]) -> int:
        """Levels of drafts in the next step of ``requests``."""
        if self.depth_override is not None:
            return self.depth_override - 1
        if self.depths is None:
            return self.proposer.depth - 1
        estimates = [r.acceptance for r in requests if r.acceptance is not None]
        context = sum(request.kv_length for request in requests) // len(requests)
        return self.depths.choose(context, len(requests), estimates) - 1

    def _learn(self, requests: list[Request], step: Step) -> None:
        if self.depths is None:
            return
        accepted = [len(tokens) - 1 for tokens in step.verdict.tokens]
        gained = sum(accepted) + len(accepted)
        context = (sum(request.kv_length for request in requests) - gained) // len(requests)
        self.depths.observe(
            context,
            len(requests),
            step.draft_len + 1,
            accepted,
            step.draft_s,
            step.verify_s,
            [r.acceptance for r in requests if r.acceptance is not None],
        )

    def _states_of(self, requests: list[Request], draft_len: int) -> VerifyStates:
        """The verify states of these requests, made anew only when one has joined or left."""
        members = [(request, request.slot) for request in requests]
        if members != self._members:
            self._members, self._states = members, {}
        if draft_len not in self._states:
            width = self.proposer.tree_width
            self._states[draft_len] = VerifyStates(
                self.kv,
                self.recurrent,
                self.tables,
                [slot for _, slot in members if slot is not None],
                draft_len + 1,
                TreeShape(width, draft_len + 1) if width > 1 and draft_len > 0 else None,
            )
        return self._states[draft_len]
