"""Proxies in front of Headwater, each as a process with our configuration files of deploy/behind and a test's ports."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests import tools
from tests.servers import Server

BEHIND = tools.ROOT / "deploy" / "behind"


class Proxy(Server):
    """`files` of deploy/behind, the first of which is what the program is given.

    `changes` are made to their texts, each at least once: ports and paths, and what a test wants otherwise. In what is
    put in, PORT stands for the port clients call, and HERE for the proxy's own directory.
    """

    files: tuple[str, ...]

    def __init__(self, changes: Mapping[str, str]) -> None:
        super().__init__()
        texts = {file: (BEHIND / file).read_text() for file in self.files}
        for old, new in {**self.own_changes(), **changes}.items():
            assert any(old in text for text in texts.values()), f"{self.files} have no {old!r}"
            put = new.replace("PORT", str(self.port)).replace("HERE", str(self.directory))
            texts = {file: text.replace(old, put) for file, text in texts.items()}
        for file, text in texts.items():
            (self.directory / Path(file).name).write_text(text)
        self.config = self.directory / Path(self.files[0]).name

    def own_changes(self) -> dict[str, str]:
        """What a test has otherwise whatever it is about."""
        return {}

    async def ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class Gateway(Proxy):
    """Envoy that asks an endpoint picker."""

    files = ("gateway.yaml",)

    @property
    def url(self) -> str:
        """Where clients call."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        run = [tools.program("envoy"), "-c", str(self.config), "--log-level", "warn", "--use-dynamic-base-id"]
        return [*run, "--concurrency", "1", "--disable-hot-restart"]

    def own_changes(self) -> dict[str, str]:
        return {"port_value: 8000": "port_value: PORT"}


class Front(Proxy):
    """A proxy with TLS in front of two balancers, on these ports."""

    folder: str  # where the configuration has its certificate

    def __init__(self, one: int, two: int) -> None:
        self.ports = {"8080": str(one), "8081": str(two)}
        super().__init__({})
        make_certificate(self.directory)

    @property
    def url(self) -> str:
        """Where clients call."""
        return f"https://localhost:{self.port}"

    @property
    def ca(self) -> str:
        """What they trust."""
        return str(self.directory / "cert.pem")

    def own_changes(self) -> dict[str, str]:
        return {"8443": "PORT", self.folder: "HERE", **self.ports}


class Nginx(Front):
    """Debian's."""

    files = ("nginx.conf",)
    folder = "/etc/nginx/headwater"

    def own_changes(self) -> dict[str, str]:
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        folders = "".join(f" {kind}_temp_path HERE/{kind};" for kind in kinds)  # else those of root
        changes = {"http {": "http {" + folders, "pid /run/nginx.pid;": "pid HERE/nginx.pid;"}
        return {**super().own_changes(), **changes}

    def command(self) -> list[str]:
        # One process: workers would outlive a master that is killed, as tests end what they started.
        only = "daemon off; master_process off;"
        return [tools.program("nginx"), "-e", "stderr", "-c", str(self.config), "-g", only]


class Haproxy(Front):
    """Debian's."""

    files = ("haproxy.cfg",)
    folder = "/etc/haproxy"

    def own_changes(self) -> dict[str, str]:
        return {**super().own_changes(), "maxconn 8000": "maxconn 200"}

    def command(self) -> list[str]:
        return [tools.program("haproxy"), "-db", "-f", str(self.config)]


class Envoy(Front):
    """From the wheel."""

    files = ("envoy.yaml",)
    folder = "/etc/envoy/headwater"
    command = Gateway.command  # type: ignore[assignment]


class Traefik(Front):
    """From the wheel."""

    files = ("traefik/traefik.yaml", "traefik/dynamic.yaml")
    folder = "/etc/traefik/headwater"

    def own_changes(self) -> dict[str, str]:
        return {**super().own_changes(), "/etc/traefik/dynamic.yaml": "HERE/dynamic.yaml"}

    def command(self) -> list[str]:
        return [tools.program("traefik"), f"--configFile={self.config}"]


FRONTS: tuple[type[Front], ...] = (Nginx, Haproxy, Envoy, Traefik)


def make_certificate(directory: Path) -> None:
    """cert.pem and key.pem for localhost, signed by itself, and both in headwater.pem as HAProxy has them."""
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    make += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    make += ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    subprocess.run([tools.program("openssl"), *make[1:]], check=True, capture_output=True)
    both = (directory / "cert.pem").read_text() + (directory / "key.pem").read_text()
    (directory / "headwater.pem").write_text(both)
