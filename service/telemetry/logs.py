"""The log: lines of text for people, or one JSON object per line for programs."""

import contextvars
import datetime
import json
import logging

from service.config import ServerConfig
from service.interceptors import current_caller, current_request_id

current_trace_id: contextvars.ContextVar[str] = contextvars.ContextVar(
    "current_trace_id", default=""
)
"""Of the call's span, as 32 hex digits; empty where no traces are made."""

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CONTEXT = {
    "request_id": current_request_id,
    "caller": current_caller,
    "trace_id": current_trace_id,
}
"""What a JSON line says, where it is known, of the call in whose context it was written."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line; a trace and its line breaks are inside the field `exception`."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, variable in CONTEXT.items() if (value := variable.get())}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(config: ServerConfig) -> None:
    """Sends the log, warnings included, to stderr, in the configured form."""
    handler = logging.StreamHandler()
    as_json = config.log_format == "json"
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=config.log_level, handlers=[handler])
    logging.captureWarnings(True)
    # At INFO, JAX reports every platform that is not there, and Orbax (absl) every step.
    for name in ("jax", "absl"):
        logging.getLogger(name).setLevel(logging.WARNING)
