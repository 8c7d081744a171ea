"""Types of settings that several modules share: checked texts, secrets and paths."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SecretStr

from purveyor.model.errors import PurveyorError

Secret = Annotated[SecretStr, Field(min_length=1, max_length=1024)]
File = Annotated[Path, AfterValidator(Path.expanduser)]


def validated_by(check: Callable[[Any], object]) -> AfterValidator:
    """Return a pydantic validator that runs one of our checks and raises ValueError."""

    def validate(value: Any) -> Any:
        try:
            check(value)
        except PurveyorError as error:
            raise ValueError(error.fix or error.message) from error
        return value

    return AfterValidator(validate)
