"""The three services: thin, between validation on the way in and translation on the way out."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, cast

import grpc

from service.chats import ChatPrompt, Chats
from service.config import ServerConfig
from service.constraint import Constraints, ConstraintSource, constraint_source
from service.engine.engine import Engine
from service.engine.errors import DuplicateRequestError
from service.errors import Violation, invalid_argument, unavailable
from service.interceptors import current_request_id
from service.model_card import ModelCard
from service.pb import (
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)
from service.reply import Reply, ReplyObserver
from service.reply_stream import ReplyStream
from service.resume import ResumeStore
from service.telemetry.load import LoadMeter, watch_interval
from service.text.tokenizer import Tokenizer
from service.translation import fold, model_message
from service.validation import (
    MAX_TEXT_BYTES,
    AcceptedRequest,
    accept,
    check_request_id,
    check_text,
    check_token_ids,
    first_token_deadline,
    max_prompt_bytes,
    request_id_of,
)

Context = grpc.aio.ServicerContext[Any, Any]


class ServedModel:
    """What the services share: card and tokenizer from the start, the engine once it is warm."""

    def __init__(
        self, card: ModelCard, tokenizer: Tokenizer, chats: Chats, constraints: Constraints
    ) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self.chats = chats
        self.constraints = constraints
        self.engine: Engine | None = None
        self.observers: Sequence[ReplyObserver] = ()

    def ready_engine(self) -> Engine:
        """Returns the engine.

        Raises:
          ServiceError: UNAVAILABLE while the model is loaded and compiled.
        """
        if self.engine is None:
            raise unavailable("WARMING_UP", "the model is being loaded and compiled")
        return self.engine


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generate, Complete, Cancel and Resume."""

    def __init__(self, served: ServedModel, kept: ResumeStore, max_resume_s: float) -> None:
        """Serves what `served` holds; `kept` holds replies for at most `max_resume_s` seconds."""
        self._served = served
        self._kept = kept
        self._max_resume_s = max_resume_s

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        """Streams a reply."""
        accepted = await self._accept(request, context, self._max_resume_s)
        if accepted.request_id in self._kept:
            raise DuplicateRequestError(accepted.request_id)
        stream = self._submit(accepted)
        if accepted.resume_window_s is not None:
            kept = self._kept.keep(accepted.request_id, stream, accepted.resume_window_s)
            await kept.serve(None, context.write)
            return
        with stream:
            while messages := await stream.read():
                for message in messages:
                    await context.write(message)

    async def Complete(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.CompleteResponse:
        """Returns what Generate streams, as one message."""
        accepted = await self._accept(request, context, None)
        response = inference_pb2.CompleteResponse()
        with self._submit(accepted) as stream:
            while messages := await stream.read():
                for message in messages:
                    fold(response, message)
        return response

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        """Ends a request by its id."""
        named(request.request_id)
        engine = self._served.engine
        running = engine is not None and engine.abort(request.request_id)
        return inference_pb2.CancelResponse(found=self._kept.cancel(request.request_id) or running)

    async def Resume(self, request: inference_pb2.ResumeRequest, context: Context) -> None:
        """Continues a stream."""
        kept = self._kept.find(named(request.request_id))
        after = request.after_sequence if request.HasField("after_sequence") else None
        await kept.serve(after, context.write)

    async def _accept(
        self,
        request: inference_pb2.GenerateRequest,
        context: Context,
        max_resume_s: float | None,
    ) -> AcceptedRequest:
        remaining = cast("float | None", context.time_remaining())
        deadline = first_token_deadline(request, time.monotonic(), remaining)
        limits = self._served.ready_engine().limits
        request_id = request_id_of(request)
        if not check_request_id(request_id):  # it is refused, and not written to the log
            current_request_id.set(request_id)
        prompt: Sequence[int] | ChatPrompt | None = None
        if request.HasField("chat"):
            prompt = await self._served.chats.prompt(request.chat, max_prompt_bytes(limits))
        elif not check_text("text", request.text, max_prompt_bytes(limits)):
            prompt = await self._served.tokenizer.encode_in_thread(request.text)
        accepted = accept(
            request, request_id, prompt, limits, self._served.card, deadline, max_resume_s
        )
        return await self._constrain(accepted, limits.vocab_size)

    async def _constrain(self, accepted: AcceptedRequest, vocab_size: int) -> AcceptedRequest:
        """Compiles what the reply must look like."""
        source = constraint_source(accepted.constraint)
        if accepted.chat is not None and (grammar := accepted.chat.grammar_of_calls) is not None:
            source = ConstraintSource("lark", grammar, "chat.tool_choice")
            accepted.constraint.grammar = grammar
        if source is None:
            return accepted
        constraint = await self._served.constraints.compile(source, vocab_size)
        choices = [dataclasses.replace(c, constraint=constraint) for c in accepted.choices]
        return dataclasses.replace(accepted, choices=tuple(choices))

    def _submit(self, accepted: AcceptedRequest) -> ReplyStream:
        # Nothing is sent before this succeeds: clients retry a call only until its first byte.
        choices = self._served.ready_engine().submit_choices(accepted.choices)
        reply = Reply(
            accepted,
            choices.streams,
            self._served.tokenizer,
            self._served.card,
            observers=self._served.observers,
        )
        return ReplyStream(choices, reply, include_queue=accepted.include_queue)


def named(request_id: str) -> str:
    """Returns the id that a call names a request by, and makes it that of the call's log line.

    Raises:
      ServiceError: INVALID_ARGUMENT, there is none, or it is none.
    """
    if not request_id:
        raise invalid_argument([Violation("request_id", "empty", "the id of a request")])
    if violations := check_request_id(request_id):
        raise invalid_argument(violations)
    current_request_id.set(request_id)
    return request_id


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Tokenize and Detokenize."""

    def __init__(self, tokenizer: Tokenizer, chats: Chats) -> None:
        self._tokenizer = tokenizer
        self._chats = chats

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        """Turns text, or a chat, into token ids."""
        if request.HasField("chat"):
            rendered = (await self._chats.prompt(request.chat, MAX_TEXT_BYTES)).rendered
            token_ids, text = rendered.token_ids, rendered.text
        elif violations := check_text("text", request.text, MAX_TEXT_BYTES):
            raise invalid_argument(violations)
        else:
            token_ids, text = await self._tokenizer.encode_in_thread(request.text), ""
        return await asyncio.to_thread(self._tokens, token_ids, text, request.include_token_bytes)

    def _tokens(
        self, token_ids: Sequence[int], rendered: str, spelled: bool
    ) -> tokenizer_pb2.TokenizeResponse:
        return tokenizer_pb2.TokenizeResponse(
            token_ids=token_ids,
            token_bytes=map(self._tokenizer.token_bytes, token_ids) if spelled else (),
            rendered=rendered,
        )

    async def Detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest, context: Context
    ) -> tokenizer_pb2.DetokenizeResponse:
        """Turns token ids into text."""
        if (count := len(request.token_ids)) > MAX_TEXT_BYTES:  # each is at least a byte
            limit = f"at most {MAX_TEXT_BYTES}"
            raise invalid_argument([Violation("token_ids", f"{count} ids", limit)])
        return await asyncio.to_thread(self._detokenize, request)

    def _detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest
    ) -> tokenizer_pb2.DetokenizeResponse:
        limit = "an id of the vocabulary"
        ids = request.token_ids
        if violations := check_token_ids("token_ids", ids, self._tokenizer, limit):
            raise invalid_argument(violations)
        text = self._tokenizer.decode(ids, include_special=request.include_special_tokens)
        return tokenizer_pb2.DetokenizeResponse(text=text)


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """GetModel, UpdateSpeculation and WatchLoad."""

    def __init__(self, served: ServedModel, config: ServerConfig) -> None:
        self._served = served
        self._config = config

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        """Describes the served model."""
        engine = self._served.ready_engine()
        model = model_message(
            self._served.card,
            engine.limits,
            self._config,
            engine.draft_cap_default,
            self._served.chats.output_format,
        )
        return model_pb2.GetModelResponse(model=model)

    async def UpdateSpeculation(
        self, request: model_pb2.UpdateSpeculationRequest, context: Context
    ) -> model_pb2.UpdateSpeculationResponse:
        """Changes the default draft cap."""
        engine = self._served.ready_engine()
        most = engine.limits.draft_length
        told = f"{request.max_draft_tokens}" if request.HasField("max_draft_tokens") else "not set"
        if told == "not set" or request.max_draft_tokens > most:
            raise invalid_argument([Violation("max_draft_tokens", told, f"in [0, {most}]")])
        engine.set_draft_cap_default(request.max_draft_tokens)
        return model_pb2.UpdateSpeculationResponse(max_draft_tokens=engine.draft_cap_default)

    async def WatchLoad(self, request: model_pb2.WatchLoadRequest, context: Context) -> None:
        """Streams the load; `DrainInterceptor` ends it."""
        interval_s, meter = watch_interval(request), LoadMeter()
        while True:
            load = meter.read(self._served.ready_engine())
            await context.write(model_pb2.WatchLoadResponse(load=load))
            await asyncio.sleep(interval_s)
