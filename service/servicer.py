"""The three services: thin, between validation on the way in and translation on the way out."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from service.engine.engine import Engine
from service.engine.errors import RequestAbortedError
from service.engine.types import FinishReason
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
from service.reply import Reply
from service.text.tokenizer import Tokenizer
from service.translation import fold, model_message
from service.validation import (
    MAX_TEXT_BYTES,
    AcceptedRequest,
    accept,
    check_text,
    check_token_ids,
    max_prompt_bytes,
    request_id_of,
)

Context = grpc.aio.ServicerContext[Any, Any]


class ServedModel:
    """What the services share: card and tokenizer from the start, the engine once it is warm."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self.engine: Engine | None = None

    def ready_engine(self) -> Engine:
        """Returns the engine.

        Raises:
          ServiceError: UNAVAILABLE while the model is loaded and compiled.
        """
        if self.engine is None:
            raise unavailable("WARMING_UP", "the model is being loaded and compiled")
        return self.engine


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generate, Complete and Cancel."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        """Streams a reply."""
        async with contextlib.aclosing(self._reply(request)) as messages:
            async for message in messages:
                await context.write(message)

    async def Complete(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.CompleteResponse:
        """Returns what Generate streams, as one message."""
        response = inference_pb2.CompleteResponse()
        async with contextlib.aclosing(self._reply(request)) as messages:
            async for message in messages:
                fold(response, message)
        return response

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        """Ends a request by its id."""
        if not request.request_id:
            raise invalid_argument([Violation("request_id", "empty", "the id of a request")])
        engine = self._served.engine
        found = engine is not None and engine.abort(request.request_id)
        return inference_pb2.CancelResponse(found=found)

    async def _reply(
        self, request: inference_pb2.GenerateRequest
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yields the messages of a reply; closing it frees the slots."""
        engine = self._served.ready_engine()
        accepted = await self._accept(request, engine)
        # Nothing is sent before this succeeds: clients retry a call only until its first byte.
        with engine.submit_choices(accepted.choices) as choices:
            reply = Reply(accepted, choices.streams, self._served.tokenizer, self._served.card)
            yield reply.started()
            try:
                async for index, chunk in choices:
                    messages = reply.push(index, chunk)
                    if reply.ended(index):  # by a stop string, perhaps: the engine knows of none
                        choices.streams[index].abort(FinishReason.STOP)
                    for message in messages:
                        yield message
            except RequestAbortedError:
                for message in reply.cancel():
                    yield message

    async def _accept(
        self, request: inference_pb2.GenerateRequest, engine: Engine
    ) -> AcceptedRequest:
        request_id = request_id_of(request)
        current_request_id.set(request_id)
        text_ids = None
        if not check_text("text", request.text, max_prompt_bytes(engine.limits)):
            text_ids = await self._served.tokenizer.encode_in_thread(request.text)
        return accept(request, request_id, text_ids, engine.limits, self._served.card)


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Tokenize and Detokenize."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizeResponse:
        """Turns text into token ids."""
        if violations := check_text("text", request.text, MAX_TEXT_BYTES):
            raise invalid_argument(violations)
        token_ids = await self._tokenizer.encode_in_thread(request.text)
        spelled = request.include_token_bytes
        return tokenizer_pb2.TokenizeResponse(
            token_ids=token_ids,
            token_bytes=map(self._tokenizer.token_bytes, token_ids) if spelled else (),
        )

    async def Detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest, context: Context
    ) -> tokenizer_pb2.DetokenizeResponse:
        """Turns token ids into text."""
        limit = "an id of the vocabulary"
        ids = request.token_ids
        if violations := check_token_ids("token_ids", ids, self._tokenizer, limit):
            raise invalid_argument(violations)
        text = self._tokenizer.decode(ids, include_special=request.include_special_tokens)
        return tokenizer_pb2.DetokenizeResponse(text=text)


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """GetModel and UpdateSpeculation."""

    def __init__(self, served: ServedModel, max_waiting_requests: int) -> None:
        self._served = served
        self._max_waiting_requests = max_waiting_requests

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        """Describes the served model."""
        engine = self._served.ready_engine()
        model = model_message(
            self._served.card, engine.limits, self._max_waiting_requests, engine.draft_cap_default
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
