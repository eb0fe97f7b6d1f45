"""Server reflection, v1 and v1alpha, with the comments of the protos.

grpcio-reflection serves v1alpha only and rebuilds files from Python's descriptors, which drop
comments. Here they come from `pb/descriptor_set.bin`, which protoc wrote with source information.

v1 is v1alpha under another package name: the same messages with the same numbers, so the same bytes
on the wire. One handler with the v1alpha classes serves both names, and the v1 file is the v1alpha
file renamed.
"""

from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, text_format
from google.rpc import error_details_pb2  # pyright: ignore[reportMissingTypeStubs]
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

DESCRIPTOR_SET = Path(__file__).parent / "pb" / "descriptor_set.bin"
REFLECTION_SERVICES = (
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
)

FileProto = descriptor_pb2.FileDescriptorProto
Response = reflection_pb2.ServerReflectionResponse


def served_files() -> list[FileProto]:
    """Returns every file that a client may ask for.

    Ours with comments, health, reflection, and google.rpc's error details, so that clients which
    know messages only through reflection can show what is in an error.
    """
    served = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTOR_SET.read_bytes())
    for module in (health_pb2, error_details_pb2, reflection_pb2):
        module.DESCRIPTOR.CopyToProto(served.file.add())
    renamed = text_format.MessageToString(served.file[-1]).replace("v1alpha", "v1")
    text_format.Parse(renamed, served.file.add())
    return list(served.file)


def described(descriptor: Any) -> list[FileProto]:
    """Returns a file that protoc made Python of, and all that it imports, without comments."""
    imported = [file for other in descriptor.dependencies for file in described(other)]
    return [FileProto.FromString(descriptor.serialized_pb), *imported]


def symbols(file: FileProto) -> Iterator[str]:
    """Yields the full name of everything that is declared in a file."""

    def declared(scope: str, message: descriptor_pb2.DescriptorProto) -> Iterator[str]:
        name = f"{scope}.{message.name}"
        yield name
        yield from (
            f"{name}.{part.name}"
            for part in (*message.field, *message.oneof_decl, *message.enum_type)
        )
        for nested in message.nested_type:
            yield from declared(name, nested)

    for message in file.message_type:
        yield from declared(file.package, message)
    for enum in file.enum_type:
        yield f"{file.package}.{enum.name}"
        yield from (f"{file.package}.{value.name}" for value in enum.value)
    for service in file.service:
        yield f"{file.package}.{service.name}"
        yield from (f"{file.package}.{service.name}.{method.name}" for method in service.method)


class Reflection:
    """Answers reflection requests about a fixed set of services."""

    def __init__(self, services: Iterable[str], files: Iterable[FileProto]) -> None:
        """Indexes the files by name and by symbol."""
        self._services = sorted(services)
        self._files = {file.name: file for file in files}
        self._file_of_symbol = {
            symbol: file.name for file in self._files.values() for symbol in symbols(file)
        }

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers both versions."""
        handler: Any = grpc.stream_stream_rpc_method_handler(
            self._serve,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=Response.SerializeToString,
        )
        for service in REFLECTION_SERVICES:
            methods = {"ServerReflectionInfo": handler}
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, methods),)
            )

    async def _serve(
        self,
        requests: AsyncIterator[reflection_pb2.ServerReflectionRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        async for request in requests:
            response = self.answer(request)
            response.valid_host = request.host
            response.original_request.CopyFrom(request)
            await context.write(response)

    def answer(self, request: reflection_pb2.ServerReflectionRequest) -> Response:
        """Answers one question; what is not known is told as NOT_FOUND inside the answer."""
        match request.WhichOneof("message_request"):
            case "list_services":
                named = [reflection_pb2.ServiceResponse(name=name) for name in self._services]
                return Response(
                    list_services_response=reflection_pb2.ListServiceResponse(service=named)
                )
            case "file_by_filename" if request.file_by_filename in self._files:
                return self._with_imports(request.file_by_filename)
            case "file_containing_symbol" if request.file_containing_symbol in self._file_of_symbol:
                return self._with_imports(self._file_of_symbol[request.file_containing_symbol])
            case "all_extension_numbers_of_type" if (
                request.all_extension_numbers_of_type in self._file_of_symbol
            ):
                none = reflection_pb2.ExtensionNumberResponse(
                    base_type_name=request.all_extension_numbers_of_type
                )
                return Response(all_extension_numbers_response=none)
            case _:
                code: int = grpc.StatusCode.NOT_FOUND.value[0]
                error = reflection_pb2.ErrorResponse(error_code=code, error_message="not found")
                return Response(error_response=error)

    def _with_imports(self, name: str) -> Response:
        names = [name]
        for known in names:  # grows while it is walked
            names += [
                imported for imported in self._files[known].dependency if imported not in names
            ]
        files = [self._files[known].SerializeToString() for known in names]
        return Response(
            file_descriptor_response=reflection_pb2.FileDescriptorResponse(
                file_descriptor_proto=files
            )
        )
