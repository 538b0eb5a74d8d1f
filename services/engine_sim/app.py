"""The routes of one simulated server: vLLM's, and /sim/… for those who test with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import msgspec

from services.engine_sim import metrics
from services.engine_sim.bodies import READERS, ApiError, read_adapter, read_tokenize
from services.engine_sim.faults import changed, of_request
from services.engine_sim.http import Connection, Request
from services.engine_sim.live import LiveEngine
from services.engine_sim.replies import DEAD, Record

VERSION = "0.32.0+headwater.sim"  # the vLLM whose API this is
MAX_TOKENS_LISTED = 1_000  # of /tokenize: enough to look at, and no way to have a huge answer made


class App:
    """Answers the requests of one listener."""

    def __init__(self, engine: LiveEngine) -> None:
        self.engine = engine
        self.connections: set[Connection] = set()
        self.max_body_bytes = engine.config.max_body_bytes
        self.max_connections = engine.config.max_connections
        self.draining = False
        self._routes: dict[str, dict[str, Callable[[Request, Connection], None]]] = {
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/version": {"GET": self._version},
            "/load": {"GET": self._load},
            "/metrics": {"GET": self._metrics},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/v1/load_lora_adapter": {"POST": self._load_adapter},
            "/v1/unload_lora_adapter": {"POST": self._unload_adapter},
            "/sim/requests": {"GET": self._requests},
            "/sim/faults": {"GET": self._faults, "POST": self._set_faults, "DELETE": self._clear_faults},
            **{path: {"POST": self._generate} for path in READERS},
        }

    def handle(self, request: Request, connection: Connection) -> None:
        """Answer one request, now or over time."""
        methods = self._routes.get(request.path)
        route = methods and methods.get("GET" if request.method == "HEAD" else request.method)
        try:
            if methods is None:
                raise ApiError(404, "Not Found", "Not Found")
            if not route:
                raise ApiError(405, "Method Not Allowed", "Method Not Allowed")
            if self.engine.loading and request.path.startswith(("/v1/", "/health", "/ping", "/tokenize")):
                raise ApiError(503, "Loading model", "ServiceUnavailableError")
            route(request, connection)
        except ApiError as error:
            self._fail(error, connection)

    def _fail(self, error: ApiError, connection: Connection) -> None:
        retry = b"retry-after: %d\r\n" % error.retry_after_s if error.retry_after_s else b""
        connection.respond(error.status, error.body(), more=self.engine.headers + retry)

    def _json(self, value: Any, connection: Connection) -> None:
        connection.respond(200, msgspec.json.encode(value), more=self.engine.headers)

    # --- vLLM ---

    def _generate(self, request: Request, connection: Connection) -> None:
        headers, engine = request.headers, self.engine
        record = Record(
            id=headers.get(b"x-request-id", b"").decode("latin-1"),
            traceparent=headers.get(b"traceparent", b"").decode("latin-1"),
            path=request.path,
            sha256=sha256(request.body).hexdigest(),
            header_names=[name.decode("latin-1") for name in headers],
        )
        engine.received += 1
        engine.records.append(record)
        try:
            self._dispatch(request, connection, record)
        except ApiError as error:
            record.status = error.status
            raise

    def _dispatch(self, request: Request, connection: Connection, record: Record) -> None:
        headers, engine = request.headers, self.engine
        try:
            faults = of_request(engine.faults, headers.get(b"x-sim-fault", b""))
        except msgspec.DecodeError as error:
            raise ApiError(400, f"x-sim-fault: {error}", param="x-sim-fault") from None
        if faults.drop_before_byte:
            engine.drop_once()
            connection.close()
            return
        if faults.refuse:
            raise ApiError(
                faults.refuse, "Refused on command.", "SimulatedError", retry_after_s=engine.config.retry_after_s
            )
        job = READERS[request.path](request.body, headers.get(b"x-sim-output-tokens", b""), engine.config)
        record.stream, record.prompt_tokens, record.model = job.stream, job.prompt_tokens, job.model
        if job.model not in engine.config.names:  # a resolver has loaded it
            engine.config = replace(engine.config, adapters=(*engine.config.adapters, job.model))
        orca = headers.get(b"endpoint-load-metrics-format", b"")
        engine.accept(job, connection, record, faults, orca)

    def _health(self, request: Request, connection: Connection) -> None:
        if self.engine.faults.hang_health:
            return
        connection.respond(503 if self.engine.dead else 200, b"", more=self.engine.headers)

    def _version(self, request: Request, connection: Connection) -> None:
        self._json({"version": VERSION}, connection)

    def _load(self, request: Request, connection: Connection) -> None:
        self._json({"server_load": len(self.engine.in_flight)}, connection)

    def _metrics(self, request: Request, connection: Connection) -> None:
        self.engine.advance()
        page = self.engine.metrics.render(self.engine.model, self.engine.config.model, self.engine.started_wall_s)
        connection.respond(200, page, metrics.CONTENT_TYPE, self.engine.headers)

    def _models(self, request: Request, connection: Connection) -> None:
        config = self.engine.config
        models: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": self.engine.identify("chat", "-")[1],
                "owned_by": "vllm",
                "root": name,
                "parent": None if name == config.model else config.model,
                "max_model_len": config.context_tokens if name == config.model else None,
                "permission": [],
            }
            for name in config.names
        ]
        self._json({"object": "list", "data": models}, connection)

    def _load_adapter(self, request: Request, connection: Connection) -> None:
        name, engine = read_adapter(request.body), self.engine
        if name in engine.config.names:
            message = f"The lora adapter '{name}' has already been loaded."
            raise ApiError(400, message, "InvalidUserInput")
        engine.config = replace(engine.config, adapters=(*engine.config.adapters, name))
        connection.respond(200, f"Success: LoRA adapter '{name}' added successfully.".encode(), b"text/plain")

    def _unload_adapter(self, request: Request, connection: Connection) -> None:
        name, engine = read_adapter(request.body), self.engine
        if name not in engine.config.adapters:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        engine.config = replace(engine.config, adapters=tuple(a for a in engine.config.adapters if a != name))
        connection.respond(200, f"Success: LoRA adapter '{name}' removed successfully.".encode(), b"text/plain")

    def _tokenize(self, request: Request, connection: Connection) -> None:
        count = read_tokenize(request.body, self.engine.config)
        if self.engine.dead:
            raise ApiError(500, DEAD, "InternalServerError")
        tokens = list(range(min(count, MAX_TOKENS_LISTED)))
        context = self.engine.config.context_tokens
        self._json({"count": count, "max_model_len": context, "tokens": tokens, "token_strs": None}, connection)

    # --- for tests ---

    def _requests(self, request: Request, connection: Connection) -> None:
        engine = self.engine
        self._json(
            {"engine": engine.config.name, "received": engine.received, "requests": list(engine.records)}, connection
        )

    def _faults(self, request: Request, connection: Connection) -> None:
        self._json(self.engine.faults, connection)

    def _set_faults(self, request: Request, connection: Connection) -> None:
        try:
            faults = changed(self.engine.faults, request.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(400, str(error)) from None
        self._json(faults, connection)
        self.engine.set_faults(faults)

    def _clear_faults(self, request: Request, connection: Connection) -> None:
        self.engine.clear_faults()
        self._json(self.engine.faults, connection)
