from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from common import config
from common.config import Name, Section, TierConfig
from common.errors import ConfigError
from common.types import InferenceRequest, Priority


class Local(TierConfig):
    """A tier's own configuration: one key more, and that one has to be given."""

    region: Name


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("HEADWATER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tier.yaml"


def load(file: Path, text: str, **overrides: Any) -> TierConfig:
    file.write_text(text, encoding="utf-8")
    return config.load(TierConfig, file, overrides)


def refused(file: Path, text: str | bytes, model: type[BaseModel] = TierConfig) -> str:
    """What is said of this file, which must be of no use."""
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        config.load(model, file)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(file))
    return message.removeprefix(str(file))


# -- what is read ----------------------------------------------------------------------------------------------------


def test_without_a_file_everything_has_its_default() -> None:
    assert config.load(TierConfig) == TierConfig()


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "{}"])
def test_a_file_may_say_nothing(file: Path, text: str) -> None:
    assert load(file, text) == TierConfig()


def test_every_default_is_valid() -> None:
    """pydantic does not check defaults by itself."""
    values = TierConfig().model_dump()
    assert TierConfig.model_validate(values) == TierConfig()


def test_a_file_sets_what_it_names_and_leaves_the_rest(file: Path) -> None:
    text = """
listen: "0.0.0.0:9000"
limits:
  header_timeout_s: 3
etcd:
  urls: ["http://10.0.0.1:2379/", "https://etcd:2379"]
network:
  emulated_rtt_s: {eu-west: 0.08, us: 0}
auth:
  route_keys: [new, old]
"""
    read = load(file, text)
    assert read.listen == "0.0.0.0:9000"
    assert read.limits == config.Limits(header_timeout_s=3.0)
    assert read.etcd.urls == ("http://10.0.0.1:2379", "https://etcd:2379")
    assert read.network.emulated_rtt_s == {"eu-west": 0.08, "us": 0.0}
    assert read.auth.route_keys == ("new", "old")
    assert read.upstream == config.Upstream()


def test_what_was_dumped_is_read_back(file: Path) -> None:
    there = TierConfig(id="a1", limits=config.Limits(max_connections=7), network=config.Network(probe_interval_s=9.0))
    assert load(file, yaml.safe_dump(there.model_dump(mode="json"))) == there


@pytest.mark.parametrize(
    ("given", "read"),
    [("127.0.0.1:80", "127.0.0.1:80"), (":80", "0.0.0.0:80"), ("[::1]:80", "[::1]:80"), ("host.name:0", "host.name:0")],
)
def test_addresses(file: Path, given: str, read: str) -> None:
    assert load(file, f'listen: "{given}"').listen == read


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("listen: ':80'\nlisten_on: x\n", ":2: unknown key 'listen_on'"),
        ("limits:\n  header_timeout_s: 3\n  header_timeout: 3\n", ":3: unknown key 'limits.header_timeout'"),
        ("limits: {\n  header_timeout_s: 3,\n  x: 3}\n", ":3: unknown key 'limits.x'"),
        ("nothing:\n  like: this\n", ":1: unknown key 'nothing'"),
        ("<<: {listen: ':80'}\n", ":1: unknown key '<<'"),
        ("limits:\n\n  header_timeout_s: 0\n", ":3: limits.header_timeout_s: input should be greater than 0 (got 0)"),
        ("limits:\n  header_timeout_s: soon\n", ":2: limits.header_timeout_s: input should be a valid number"),
        ("limits:\n  header_timeout_s: .inf\n", ":2: limits.header_timeout_s: input should be"),
        ("limits:\n  header_timeout_s: .nan\n", ":2: limits.header_timeout_s: input should be"),
        ("limits:\n  max_connections: 1.5\n", ":2: limits.max_connections: input should be a valid integer"),
        ("limits:\n  max_connections: 2000000\n", ":2: limits.max_connections: input should be less than or equal to"),
        ("log:\n  level: loud\n", ":2: log.level: input should be 'debug', 'info', 'warning' or 'error' (got 'loud')"),
        ("log:\n  access: maybe\n", ":2: log.access: input should be a valid boolean"),
        ("limits: 7\n", ":1: limits: input should be a valid dictionary"),
        ("limits:\n", ":1: limits: input should be a valid dictionary"),
        ("listen: 8080\n", ":1: listen: input should be a valid string (got 8080)"),
        ("listen: localhost\n", ":1: listen: must be HOST:PORT, as in 127.0.0.1:8080 (got 'localhost')"),
        ("listen: 'a:70000'\n", ":1: listen: must be HOST:PORT"),
        ("listen: 'a:²'\n", ":1: listen: "),
        ("id: 'with space'\n", ":1: id: must be 1 to 64 of letters"),
        ("id: ''\n", ":1: id: must be 1 to 64 of letters"),
        (f"id: {'x' * 65}\n", ":1: id: must be 1 to 64 of letters"),
        (
            "etcd:\n  urls:\n    - http://a:1\n    - b:2\n",
            ":4: etcd.urls.1: must be a URL, as in http://127.0.0.1:8000",
        ),
        ("etcd:\n  urls: http://a:1\n", ":2: etcd.urls: input should be a valid tuple"),
        ("network:\n  emulated_rtt_s:\n    eu: 0.1\n    us: 99\n", ":4: network.emulated_rtt_s.us: input should be"),
        ("network:\n  emulated_rtt_s:\n    e u: 0.1\n", ":3: network.emulated_rtt_s.e u"),
        ("retry: {budget_ratio: 1.5}\n", ":1: retry.budget_ratio: input should be less than or equal to 1 (got 1.5)"),
    ],
)
def test_a_bad_key_or_value_is_named_with_its_line(file: Path, text: str, said: str) -> None:
    assert refused(file, text).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("listen: ':1'\nadmin: ':2'\nlisten: ':3'\n", ":3: the key 'listen' is given twice"),
        ("limits:\n  max_connections: 1\n  max_connections: 1\n", ":3: the key 'max_connections' is given twice"),
        ("limits: {}\nlimits: {}\n", ":2: the key 'limits' is given twice"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(file: Path, text: str, said: str) -> None:
    assert refused(file, text) == said


def test_one_key_in_two_sections_is_not_given_twice(file: Path) -> None:
    text = "limits:\n  max_connections: 5\nupstream:\n  max_connections: 6\n"
    assert load(file, text).upstream.max_connections == 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limits: {\n", ":2: not valid YAML"),
        ("a: b: c\n", ":1: not valid YAML"),
        ("\tlisten: x\n", ":1: not valid YAML"),
        ("listen: 'x\n", ": not valid YAML"),
        ("listen: *nowhere\n", ":1: not valid YAML"),
        ("a: 1\n---\nb: 2\n", ": not valid YAML"),
        ("\nlisten: !python/object:os.system x\n", ":2: not valid YAML"),
        ("\nid: 2024-13-45\n", ":2: not valid YAML"),
        ("\nid: !!int abc\n", ":2: not valid YAML"),
        ("\nlog: {access: !!bool perhaps}\n", ":2: not valid YAML"),
        ("listen: \x00\n", ": not valid YAML"),
        ("- listen\n", ":1: expected keys and values"),
        ("just a text\n", ":1: expected keys and values"),
        (b"listen: \xff\n", ": cannot be read"),
    ],
)
def test_what_is_no_mapping_in_yaml_is_refused(file: Path, text: str | bytes, said: str) -> None:
    if said.startswith(": not"):  # somewhere
        assert said.removeprefix(":") in refused(file, text)
    else:
        assert refused(file, text).startswith(said)


def test_a_key_that_has_to_be_given_is_missed(file: Path) -> None:
    assert refused(file, "listen: ':80'\n", Local) == ": region: field required"


def test_a_file_that_is_not_there_or_not_a_file_is_named(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "absent.yaml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"^{path}: cannot be read: {why}"):
            config.load(TierConfig, path)


def test_secrets_are_neither_shown_in_errors_nor_in_what_is_printed(file: Path) -> None:
    assert "12345678" not in refused(file, "etcd:\n  password: 12345678\n")
    assert "12345678" not in refused(file, "auth:\n  route_keys: [a, 12345678]\n")
    assert "12345678" not in refused(file, "auth:\n  route_keys: 12345678\n")
    read = load(file, "etcd: {password: hush}\nauth: {route_keys: [hush]}\n")
    assert "hush" not in repr(read)


def test_a_configuration_does_not_change(file: Path) -> None:
    read = load(file, "")
    with pytest.raises(ValueError, match="frozen"):
        read.listen = ":1"  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        read.limits.max_connections = 1  # type: ignore[misc]


# -- the environment and the command line ----------------------------------------------------------------------------


def test_the_environment_wins_over_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_LIMITS__HEADER_TIMEOUT_S", "7.5")
    monkeypatch.setenv("HEADWATER_LISTEN", "127.0.0.1:81")
    read = load(file, "listen: ':80'\nlimits: {header_timeout_s: 3, max_connections: 9}\n")
    assert (read.listen, read.limits.header_timeout_s, read.limits.max_connections) == ("127.0.0.1:81", 7.5, 9)


def test_the_environment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_REGION", "eu")
    monkeypatch.setenv("HEADWATER_ETCD__URLS", "[http://a:1, http://b:2]")
    monkeypatch.setenv("HEADWATER_NETWORK__EMULATED_RTT_S", "{eu: 0.1}")
    monkeypatch.setenv("HEADWATER_LOG", "{level: debug}")
    read = config.load(Local)
    assert (read.region, read.etcd.urls) == ("eu", ("http://a:1", "http://b:2"))
    assert (read.network.emulated_rtt_s, read.log.level) == ({"eu": 0.1}, "debug")


@pytest.mark.parametrize("text", ["no", "007", "1e3", "a #b", "*x", "@x", "2024-13-45", "null", "{a", "x: y", "'q'"])
def test_text_stands_in_the_environment_as_it_is(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_ETCD__PASSWORD", text)
    assert config.load(TierConfig).etcd.password == text


def test_names_are_text_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_REGION", "no")
    monkeypatch.setenv("HEADWATER_ID", "007")
    read = config.load(Local)
    assert (read.region, read.id) == ("no", "007")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("HEADWATER_LISTEN", "nowhere", "listen: must be HOST:PORT, as in 127.0.0.1:8080 (got 'nowhere')"),
        ("HEADWATER_LIMITS__HEADER_TIMEOUT_S", "soon", "limits.header_timeout_s: input should be a valid number"),
        ("HEADWATER_LIMITS__HEADER_TIMEOUT_S", "", "limits.header_timeout_s: input should be a valid number"),
        ("HEADWATER_LIMITS__HEADER_TIMEOUT", "3", "unknown key 'limits.header_timeout'"),
        ("HEADWATER_NO_SUCH_KEY", "3", "unknown key 'no_such_key'"),
        ("HEADWATER_LIMITS", "{max_connections: 0}", "limits.max_connections: input should be greater than"),
        ("HEADWATER_LIMITS", "{", "not valid YAML"),
        ("HEADWATER_RETRY__ATTEMPTS", "2024-13-45", "not valid YAML"),
        ("HEADWATER_LISTEN__X", "3", "'listen' is not a section"),
        ("HEADWATER_", "3", "unknown key ''"),
    ],
)
def test_a_bad_variable_is_named(name: str, text: str, said: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as caught:
        load(file, "listen: ':80'\nlimits: {max_connections: 5}\n")
    message = str(caught.value)
    if said.startswith("unknown key ''"):
        assert name in message
    else:
        assert message.startswith(f"environment variable {name}: {said}")
    assert str(file) not in message


def test_a_bad_variable_never_shows_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_AUTH__ROUTE_KEYS", "[s3cret: {")
    with pytest.raises(ConfigError) as caught:
        config.load(TierConfig)
    assert "s3cret" not in str(caught.value)


def test_a_good_variable_does_not_take_the_blame_for_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_LIMITS__HEADER_TIMEOUT_S", "7.5")
    assert refused(file, "limits:\n  max_connections: 0\n").startswith(":2: limits.max_connections")


def test_other_variables_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_ADMIN_URL", "http://127.0.0.1:9080")  # of the command line's clients
    monkeypatch.setenv("HEADWATERS", "x")
    monkeypatch.setenv("LISTEN", "x")
    assert config.load(TierConfig) == TierConfig()


def test_the_command_line_wins_over_everything_and_none_is_not_given(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_LISTEN", "127.0.0.1:81")
    monkeypatch.setenv("HEADWATER_ADMIN", "127.0.0.1:82")
    read = load(file, "listen: ':80'\n", listen="127.0.0.1:83", admin=None)
    assert (read.listen, read.admin) == ("127.0.0.1:83", "127.0.0.1:82")


def test_a_bad_flag_is_not_blamed_on_the_file(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^command line: listen: must be HOST:PORT"):
        load(file, "listen: ':80'\n", listen="x")


# -- secrets in files --------------------------------------------------------------------------------------------------


def test_secrets_come_from_files(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"password": "p w\n", "keys": "one-key\n\ntwo-key\n", "url": "redis://:x@h:1/0"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("HEADWATER_REDIS__URL_FILE", str(tmp_path / "url"))
    text = f"etcd: {{password_file: {tmp_path}/password}}\nauth: {{route_keys_file: {tmp_path}/keys}}\n"
    read = load(file, text)
    assert (read.etcd.password, read.redis.url) == ("p w", "redis://:x@h:1/0")
    assert read.auth.route_keys == ("one-key", "two-key")
    assert "p w" not in repr(read)
    assert "two-key" not in repr(read)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("etcd:\n  password_file: /nowhere", ": line 2: etcd.password_file: /nowhere cannot be read"),
        ("etcd: {password: a, password_file: /dev/null}", "etcd.password_file: excludes password"),
        ("etcd: {password_file: /dev/null}", "etcd.password_file: /dev/null is empty"),
        ("etcd: {prefix_file: /dev/null}", "unknown key 'etcd.prefix_file'"),  # of secrets alone
    ],
)
def test_a_file_of_a_secret_that_is_of_no_use(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(TierConfig, file)
    assert said.removeprefix(": ") in str(caught.value)


def test_a_bad_secret_from_a_file_is_not_shown(file: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("too short")
    file.write_text(f"auth: {{admin_tokens_file: {tmp_path}/tokens}}")
    with pytest.raises(ConfigError) as caught:
        config.load(TierConfig, file)
    assert "too short" not in str(caught.value)
    assert "tokens" in str(caught.value)


# -- every key -------------------------------------------------------------------------------------------------------


def keys(model: type[BaseModel], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """(path, type, default) of every key that is no section."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from keys(field.annotation, (*at, name))
        else:
            yield (*at, name), field.annotation, field.default


SPECIAL = {
    "models.shadows": "{chat: {model: small, ratio: 0.5}}",
    "retry.continue_streams": "[/v1/completions]",
    "policy.slo_ttft_s": "2.5",
    "policy.slo_tpot_s": "0.1",
    "listen": "127.0.0.1:1",
    "admin": "127.0.0.1:1",
    "id": "x-1",
    "affinity.routes": "[{path: /v1/completions, mode: strict}]",
    "etcd.urls": "[http://a:1]",
    "limits.requests_per_s_per_address": "10.0",
    "limits.unlimited_addresses": "[10.0.0.0/8]",
    "policy.regions": "{eu: {max_in_flight: 5}}",
    "residency.header": "x-data-residency",
    "residency.rules": "[{tenants: [acme], allow: [eu]}]",
    "clients.locations": "[{location: eu, networks: [10.0.0.0/8]}]",
    "clients.location_header": "x-client-region",
    "clients.trusted_proxies": "[10.0.0.1/32]",
    "auth.route_keys": "[one, two]",
    "auth.admin_tokens": "[0123456789abcdef]",
    "cors.allowed_origins": "[https://a.example]",
    "streaming.keepalive_comment_s": "10.0",
    "forward.drop_headers": "[x-one, X-Two]",
    "network.emulated_rtt_s": "{eu: 0.5}",
    "reports.listen": "127.0.0.1:1",
    "tenants.prices": "{'*': {input_usd: 1.5}}",
    "tenants.oidc": "[{issuer: 'https://a.example', audience: [b]}]",
    "models.tokenizers": "{llama: /m/tokenizer.json}",
    "models.on_demand": "[a*]",
    "models.aliases": "{a: b, c: {d: 1.0, e: 2.0}}",
    "models.splits": "{a: {v1: 9.0, v2: 1.0}}",
    "health.event_url": "http://h:1/events",
    "placement.rules": "[{models: [a*], gpus: [h100], labels: {site: edge}, priorities: [critical]}]",
}


def another(path: str, kind: Any, default: Any) -> str:
    """A valid value that differs from the default, as one would write it into the environment."""
    if path in SPECIAL:
        return SPECIAL[path]
    if get_origin(kind) is Literal:
        return str(next(value for value in get_args(kind) if value != default))
    if kind is bool:
        return str(not default).lower()
    if kind is int:
        return str(default + 1)
    if kind is float:
        return str(default / 2)
    assert kind is str, f"{path}: say in SPECIAL what else it may be"
    return "something"


def dumped(value: Any) -> Any:
    """As `model_dump` has it, where sections are in a list or have names of the user's."""
    if isinstance(value, tuple):
        return tuple(dumped(v) for v in value)
    if isinstance(value, dict):
        return {k: dumped(v) for k, v in value.items()}
    return value.model_dump() if isinstance(value, BaseModel) else value


EVERY = [pytest.param(*key, id=".".join(key[0])) for key in keys(TierConfig)]


@pytest.mark.parametrize(("path", "kind", "default"), EVERY)
def test_every_key_is_reached_by_its_variable(
    path: tuple[str, ...], kind: Any, default: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if get_origin(kind) in (Union, UnionType):
        kind = next(k for k in get_args(kind) if k is not type(None))
    monkeypatch.setenv("HEADWATER_" + "__".join(path).upper(), another(".".join(path), kind, default))
    read: Any = config.load(TierConfig)
    value = read
    for part in path:
        value = getattr(value, part)
    assert value != default
    expected: Any = TierConfig().model_dump()
    section = expected
    for part in path[:-1]:
        section = section[part]
    section[path[-1]] = dumped(value)
    assert read.model_dump() == expected  # and nothing else has changed


def test_rules_of_placement_become_needs_of_requests() -> None:
    read = TierConfig.model_validate(
        {
            "placement": {
                "rules": [
                    {"models": ["*-70b"], "min_memory_gb": 80, "gpus": ["h100", "h200"]},
                    {"operations": ["image_*"], "labels": {"pool": "images"}, "exclusive": True},
                ]
            }
        }
    ).placement
    needs = read.needs()
    ask = InferenceRequest("0" * 32, "llama-70b", priority=Priority.CRITICAL, operation="chat")
    need = needs.of(ask)
    assert (need.min_memory_gb, need.gpus, need.fastest) == (80.0, {"h100", "h200"}, True)
    assert need.forbidden == (frozenset({"pool=images"}),)
    assert needs.of(replace(ask, operation="image_edit")).labels == {"pool=images"}
    assert not needs.of(replace(ask, priority=Priority.BATCH)).fastest
    assert not TierConfig.model_validate({"placement": {"critical_to_fastest": False}}).placement.needs().rules


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ({"gpus": ["H100"]}, "placement.rules.0.gpus"),
        ({"labels": {"a b": "c"}}, "placement.rules.0.labels"),
        ({"exclusive": True}, "labels say which servers"),
        ({"priorities": ["vip"]}, "placement.rules.0.priorities"),
        ({"prefer": ["h100"]}, "unknown key 'placement.rules.0.prefer'"),
    ],
)
def test_rules_that_make_no_sense_are_named(rule: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        config.load(TierConfig, overrides={"placement": {"rules": [rule]}})


def test_no_key_could_be_mistaken_for_a_section() -> None:
    """Two underscores separate sections in the environment."""
    assert not [path for path, _, _ in keys(TierConfig) if any("__" in part for part in path)]
    assert len(list(keys(TierConfig))) > 40
