"""`python -m services.engine_sim`: simulated inference servers in this process."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer
import uvloop

from common.errors import ConfigError
from services.engine_sim.config import EngineConfig, ServeConfig, engines_from
from services.engine_sim.server import serve

_BASE = EngineConfig()
# What typer raises for a wrong command line: click's class, or typer's own copy of it since it carries one.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def run(config: ServeConfig) -> None:
    """Serve until told to stop, on an event loop made for it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))


def command(
    profile: Annotated[str, typer.Option(help="GPU class: h200, h100, a100, l4, t4 or cpu.")] = _BASE.profile,
    model: Annotated[str, typer.Option(help="Name of the model it serves.")] = _BASE.model,
    adapter: Annotated[list[str] | None, typer.Option(help="A LoRA adapter of it, loaded; repeated.")] = None,
    loadable: Annotated[list[str] | None, typer.Option(help="One that it loads when asked for; repeated.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _BASE.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")] = _BASE.port,
    name: Annotated[str, typer.Option(help="Name in x-engine-id; default PROFILE-PORT.")] = _BASE.name,
    engine: Annotated[list[str] | None, typer.Option(help="PROFILE:PORT[:NAME], repeated: several servers.")] = None,
    count: Annotated[int, typer.Option(help="So many servers, on ports from --port up.")] = 1,
    speed: Annotated[float, typer.Option(help="Times faster than life.")] = _BASE.speed,
    tick: Annotated[float, typer.Option(help="Least seconds between two writes to a stream.")] = _BASE.tick_s,
    load_time: Annotated[float, typer.Option(help="Seconds of loading at start.")] = _BASE.load_time_s,
    kv_tokens: Annotated[int, typer.Option(help="KV memory in tokens; 0: the GPU class's.")] = _BASE.kv_tokens,
    slots: Annotated[int, typer.Option(help="Sequences in one batch; 0: the GPU class's.")] = _BASE.slots,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait.")] = _BASE.max_queue,
    queue_full_status: Annotated[int, typer.Option(help="503 or 429.")] = _BASE.queue_full_status,
    retry_after: Annotated[int, typer.Option(help="Seconds in Retry-After; 0: none.")] = _BASE.retry_after_s,
    max_model_len: Annotated[int, typer.Option(help="Tokens of prompt and answer.")] = _BASE.max_model_len,
    prefix_fraction: Annotated[float, typer.Option(help="Share of KV memory that caches.")] = _BASE.prefix_fraction,
    mean_output_tokens: Annotated[float, typer.Option(help="Of answers without a length.")] = _BASE.mean_output_tokens,
    seed: Annotated[int, typer.Option(help="Of those lengths.")] = _BASE.seed,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.")] = _BASE.max_body_bytes,
    keepalive_timeout: Annotated[float, typer.Option(help="Seconds.")] = _BASE.keepalive_timeout_s,
    grace: Annotated[float, typer.Option(help="Seconds for streams to end after SIGTERM.")] = 30.0,
) -> None:
    """Simulated inference servers: vLLM's API and metrics in front of a model of continuous batching."""
    try:
        base = EngineConfig(
            profile=profile,
            model=model,
            adapters=tuple(adapter or ()),
            loadable=tuple(loadable or ()),
            host=host,
            port=port,
            name=name,
            speed=speed,
            tick_s=tick,
            load_time_s=load_time,
            kv_tokens=kv_tokens,
            slots=slots,
            max_queue=max_queue,
            queue_full_status=queue_full_status,
            retry_after_s=retry_after,
            max_model_len=max_model_len,
            prefix_fraction=prefix_fraction,
            mean_output_tokens=mean_output_tokens,
            seed=seed,
            max_body_bytes=max_body_bytes,
            keepalive_timeout_s=keepalive_timeout,
        )
        run(ServeConfig(engines_from(base, engine or [], count), grace))
    except ConfigError as error:
        sys.stderr.write(f"headwater engine: {error}\n")
        raise typer.Exit(1) from None


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code. What is wrong with it is said in one line."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    try:
        code = app(args=arguments, prog_name="headwater engine", standalone_mode=False)
    except _UsageError as error:
        message: str = getattr(error, "format_message", error.__str__)()
        sys.stderr.write(f"headwater engine: {message.splitlines()[0]}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
