"""Stages and type checkers: correct flows pass `mypy --strict`, wrong ones get an error at their line."""

import subprocess
import sys
from pathlib import Path

HEAD = """
from dataclasses import dataclass
from sqlalchemy.ext.asyncio import AsyncSession
from purveyor.stages import Context, Goto, Next, Reply, Request, Stages

@dataclass
class Place: item: str
@dataclass
class Reserve: item: str
@dataclass
class Reserved: shelf: int
@dataclass
class Placed: text: str
@dataclass
class State: item: str = ""

def declare(stages: Stages) -> None:
    inventory = stages.remote("inventory.reserve", request=Reserve, reply=Reserved)
    orders = stages.endpoint("orders.place", request=Place, reply=Placed, state=State)
    done = stages.terminator("orders.done", message=Placed)
"""

RIGHT = """
    @orders.stage(exactly_once=True, concurrency=4)
    async def reserve(ctx: Context[State], msg: Place, db: AsyncSession) -> Request[Reserved]:
        ctx.send(done, Placed("begun"))
        return Request(inventory, Reserve(msg.item))
    @orders.stage
    async def between(ctx: Context[State], msg: Reserved) -> Next[Reserved] | Reply[Placed] | None:
        return Next(msg) if msg.shelf else Reply(Placed(ctx.state.item))
    @orders.last_stage
    async def confirm(ctx: Context[State], msg: Reserved, db: AsyncSession) -> Placed:
        return Placed(ctx.state.item)
    async def edge() -> str:
        return (await stages.ask(orders, Place("book"))).text
"""

WRONG = {
    "a message that the endpoint does not take": """
        return Request(inventory, Place(msg.item))""",
    "a reply of another type": """
        return Reply(Reserved(1))""",
    "a target that replies another type": """
        return Goto(inventory, Reserve(msg.item))""",
    "something that is no outcome": """
        return msg""",
    "a field that the state does not have": """
        return Next(ctx.state.colour)""",
}


def test_mypy_understands_what_stages_return(tmp_path: Path) -> None:
    wrong = "".join(
        f"""
    @orders.stage
    async def wrong_{number}(ctx: Context[State], msg: Place):  # {name}{body}
""".replace("):", ") -> Request[Reserved] | Reply[Placed] | Goto[Placed] | Next[Reserved]:")
        for number, (name, body) in enumerate(WRONG.items())
    )
    program = tmp_path / "flows.py"
    program.write_text(HEAD + RIGHT + wrong)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(_cache()), str(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    lines = program.read_text().splitlines()
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    expected = {
        number for number, line in enumerate(lines, 1) if number > len((HEAD + RIGHT).splitlines()) and "return" in line
    }
    assert found == expected, done.stdout


def _cache() -> Path:
    return Path(__file__).parents[2] / ".mypy_cache"
