"""The errors that a user can meet: one sentence, a hint, an exit code. Caught once, in `advisor.cli`."""


class AdvisorError(Exception):
    """Something the user can mend.

    Attributes:
        message: one clear sentence that says what is wrong.
        hint: what to try next; may be empty.
        exit_code: exit status of the command (2: bad input or nothing to advise).
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class ScriptError(AdvisorError):
    """The user's script is missing, broken, or never takes a training step."""


class HardwareError(AdvisorError):
    """A GPU, link or cluster that the catalogue does not know or that cannot exist."""


class NoPlanError(AdvisorError):
    """No legal plan fits the cluster; the message says by how much."""


class OutputError(AdvisorError):
    """The advice cannot be written where it was asked for."""
