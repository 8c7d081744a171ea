"""The files of deploy/ parse, their references exist, and they start commands that exist."""

import configparser
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types

from purveyor.app.cli.queues import password_variable
from purveyor.jetstream.server.process import find_server
from purveyor.queues.permissions import component_users
from tests.deploy import schemas
from tests.support.deployment import DEPLOY, check_command, check_setting, valid

KUBERNETES = DEPLOY / "kubernetes"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def manifests() -> list[dict[str, Any]]:
    return [each for path in sorted(KUBERNETES.glob("*.yaml")) for each in documents(path)]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [each for each in manifests() if each["kind"] in kinds]


def workloads() -> list[dict[str, Any]]:
    return of_kind("Deployment", "StatefulSet")


# Kubernetes


def test_every_manifest_is_of_its_kind() -> None:
    for each in manifests():
        valid(schemas.KINDS[each["kind"]], each, f"{each['kind']} {each.get('metadata')}")


def test_the_kustomization_names_every_file() -> None:
    (kustomization,) = documents(KUBERNETES / "kustomization.yaml")
    there = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml", "secrets.example.yaml"}
    assert set(kustomization["resources"]) == there | {"secrets.yaml"}
    assert all((KUBERNETES / name).exists() for each in kustomization["configMapGenerator"] for name in each["files"])


def test_the_kustomization_can_be_built() -> None:
    """Find what kustomize refuses or ignores: two resources of one name, an unused image or map."""
    (kustomization,) = documents(KUBERNETES / "kustomization.yaml")
    resources = [(each["kind"], each["metadata"]["name"]) for each in manifests() if each["kind"] != "Kustomization"]
    generated = [("ConfigMap", each["name"]) for each in kustomization["configMapGenerator"]]
    assert len({*resources, *generated}) == len(resources) + len(generated)
    assert ("Namespace", kustomization["namespace"]) in resources
    pods = [work["spec"]["template"]["spec"] for work in workloads()]
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert {each["name"] for each in kustomization["images"]} <= images
    mounted = {volume["configMap"]["name"] for pod in pods for volume in pod["volumes"] if "configMap" in volume}
    assert {name for _, name in generated} <= mounted


def test_what_manifests_refer_to_exists() -> None:
    keys = {key for secret in of_kind("Secret") for key in secret["stringData"]}
    maps = {each["metadata"]["name"] for each in of_kind("ConfigMap")} | {"nats-config"}
    services = {each["metadata"]["name"] for each in of_kind("Service")}
    used: set[str] = set()
    for work in workloads():
        spec, name = work["spec"], work["metadata"]["name"]
        pod = spec["template"]["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == work["metadata"]["labels"]
        assert spec.get("serviceName", name) in services | {name}
        volumes = {
            each["name"] for each in (*pod["volumes"], *(c["metadata"] for c in spec.get("volumeClaimTemplates", ())))
        }
        for container in pod["containers"]:
            ports = {port["name"] for port in container["ports"]}
            probes = [container[probe] for probe in container if probe.endswith("Probe")]
            assert {probe["httpGet"]["port"] for probe in probes} <= ports
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            for env in container["env"]:
                check_setting(env["name"], name)
                used |= (
                    {env["valueFrom"]["secretKeyRef"]["key"]} if "secretKeyRef" in env.get("valueFrom", {}) else set()
                )
            assert {each["configMapRef"]["name"] for each in container.get("envFrom", ())} <= maps
            if container["image"] == "purveyor":
                check_command(container["args"], name)
        assert {each["configMap"]["name"] for each in pod["volumes"] if "configMap" in each} <= maps
    assert used == keys


def test_services_reach_ports_that_pods_have() -> None:
    pods = {str(work["metadata"]["labels"]): work["spec"]["template"]["spec"] for work in workloads()}
    for service in of_kind("Service"):
        pod = pods[str(service["spec"]["selector"])]
        ports = {port["name"] for container in pod["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for budget in of_kind("PodDisruptionBudget"):
        assert str(budget["spec"]["selector"]["matchLabels"]) in pods


def test_shared_settings_are_settings() -> None:
    for name in next(each for each in of_kind("ConfigMap"))["data"]:
        check_setting(name, "settings.yaml")


# NATS


@pytest.mark.parametrize("folder", ["nats", "kubernetes"])
def test_the_server_takes_its_configuration(folder: str) -> None:
    passwords = {password_variable(user): f"p{user}" for user in ("admin", *(each.user for each in component_users()))}
    done = subprocess.run(
        [find_server().path, "-t", "-c", DEPLOY / folder / "nats.conf"],
        env={**os.environ, **passwords, "POD_NAME": "nats-0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_user_of_the_server_gets_a_password() -> None:
    wanted = {password_variable(user) for user in ("admin", *(each.user for each in component_users()))}
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]["nats"]["environment"]) == wanted
    (nats,) = [each for each in workloads() if each["metadata"]["name"] == "nats"]
    given = {env["name"] for env in nats["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert given - {"POD_NAME"} == wanted


# Compose


def test_the_compose_file_is_one() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    valid(schemas.COMPOSE, compose, "compose.yaml")
    example = (DEPLOY / ".env.example").read_text()
    known = set(re.findall(r"^([A-Z_]+)=", example, re.MULTILINE))
    for name, service in compose["services"].items():
        assert set(service.get("depends_on", ())) <= set(compose["services"])
        for key, value in service.get("environment", {}).items():
            check_setting(key, name)
            wanted = set(re.findall(r"\$\{([A-Z_]+):\?", value))
            assert wanted <= known, f"{name}: {wanted - known} is not in .env.example"
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], volume
        if service["image"] == "purveyor":
            check_command(service["command"], name)
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()


# systemd


def read_unit(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names of systemd have capitals
    unit.read(path)
    return unit


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_a_command_that_exists(path: Path) -> None:
    unit = read_unit(path)
    service = unit["Service"]
    program, *words = service["ExecStart"].split()
    assert program.endswith("/purveyor")
    check_command(words, path.name)
    for pair in service["Environment"].split():
        check_setting(pair.partition("=")[0], path.name)
    after = {name for name in unit["Unit"]["After"].split() if name.startswith("purveyor")}
    assert after <= {each.name for each in UNITS}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_has_directives_that_systemd_knows(path: Path) -> None:
    unit = read_unit(path)
    valid(schemas.UNIT, {name: dict(unit[name]) for name in unit.sections()}, path.name)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("Restarts=on-failure", "Restarts"),
        ("PrivateTmp=maybe", "maybe"),
        ("TimeoutStopSec=soon", "soon"),
        ("ExecStart=purveyor up", "purveyor up"),
        ("RestrictAddressFamilies=AF_INET6 INET", "INET"),
    ],
)
def test_a_directive_that_systemd_does_not_know_is_found(line: str, wrong: str) -> None:
    name, _, value = line.partition("=")
    unit = read_unit(UNITS[0])
    unit["Service"][name] = value
    with pytest.raises(AssertionError, match=wrong):
        valid(schemas.UNIT, {each: dict(unit[each]) for each in unit.sections()}, "a unit")


def test_the_example_of_settings_names_settings() -> None:
    for name in re.findall(r"^#?(PURVEYOR_[A-Z_]+)=", (DEPLOY / "systemd" / "purveyor.env").read_text(), re.MULTILINE):
        check_setting(name, "purveyor.env")
