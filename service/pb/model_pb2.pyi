import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "fingerprint", "context_length", "vocab_size", "end_token_ids", "slots", "draft_length", "page_size", "limits", "defaults", "pages", "speculation_bytes_per_slot", "configuration", "chat_format")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_BYTES_PER_SLOT_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    CHAT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    context_length: int
    vocab_size: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    slots: int
    draft_length: int
    page_size: int
    limits: ModelLimits
    defaults: ModelDefaults
    pages: int
    speculation_bytes_per_slot: int
    configuration: _struct_pb2.Struct
    chat_format: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., slots: _Optional[int] = ..., draft_length: _Optional[int] = ..., page_size: _Optional[int] = ..., limits: _Optional[_Union[ModelLimits, _Mapping]] = ..., defaults: _Optional[_Union[ModelDefaults, _Mapping]] = ..., pages: _Optional[int] = ..., speculation_bytes_per_slot: _Optional[int] = ..., configuration: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., chat_format: _Optional[str] = ...) -> None: ...

class ModelLimits(_message.Message):
    __slots__ = ("max_message_bytes", "max_prompt_bytes", "max_text_bytes", "max_stop_strings", "max_stop_string_bytes", "max_stop_token_ids", "max_waiting_requests", "max_logit_bias", "max_choices", "max_waiting_tokens", "max_resume_window", "max_top_logprobs", "max_constraint_bytes")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRING_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHOICES_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RESUME_WINDOW_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONSTRAINT_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_prompt_bytes: int
    max_text_bytes: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_waiting_requests: int
    max_logit_bias: int
    max_choices: int
    max_waiting_tokens: int
    max_resume_window: _duration_pb2.Duration
    max_top_logprobs: int
    max_constraint_bytes: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_prompt_bytes: _Optional[int] = ..., max_text_bytes: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., max_stop_string_bytes: _Optional[int] = ..., max_stop_token_ids: _Optional[int] = ..., max_waiting_requests: _Optional[int] = ..., max_logit_bias: _Optional[int] = ..., max_choices: _Optional[int] = ..., max_waiting_tokens: _Optional[int] = ..., max_resume_window: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_top_logprobs: _Optional[int] = ..., max_constraint_bytes: _Optional[int] = ...) -> None: ...

class ModelDefaults(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "max_draft_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    max_draft_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...

class UpdateSpeculationRequest(_message.Message):
    __slots__ = ("max_draft_tokens",)
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_draft_tokens: int
    def __init__(self, max_draft_tokens: _Optional[int] = ...) -> None: ...

class UpdateSpeculationResponse(_message.Message):
    __slots__ = ("max_draft_tokens",)
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_draft_tokens: int
    def __init__(self, max_draft_tokens: _Optional[int] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: Load
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "prefilling", "waiting", "waiting_tokens", "slots", "pages_used", "pages", "tokens_per_second", "draft_acceptance", "estimated_wait_duration")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    running: int
    prefilling: int
    waiting: int
    waiting_tokens: int
    slots: int
    pages_used: int
    pages: int
    tokens_per_second: float
    draft_acceptance: float
    estimated_wait_duration: _duration_pb2.Duration
    def __init__(self, running: _Optional[int] = ..., prefilling: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., slots: _Optional[int] = ..., pages_used: _Optional[int] = ..., pages: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., draft_acceptance: _Optional[float] = ..., estimated_wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
