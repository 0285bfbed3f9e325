"""The errors that users can meet. Each message gives the problem, its place and the way out in one sentence."""


class PolyclinicError(Exception):
    """The base class of all errors that users can mend. The command line prints them without a traceback."""


class RecipeError(PolyclinicError):
    """A recipe that cannot run: an unknown key, a wrong value, an impossible combination."""


class DataError(PolyclinicError):
    """Images, labels or partitions that cannot be trained on."""


class WeightsError(PolyclinicError):
    """A weights file that is missing, unreadable, or made for another network."""


class StoreError(PolyclinicError):
    """A run folder that cannot be written, read or resumed."""


class EngineError(PolyclinicError):
    """An engine that cannot run here."""


class RoundFailed(PolyclinicError):  # noqa: N818  it names what happened
    """Fewer sites than the quorum delivered an acceptable update; the state was left as it was."""


class Refused(PolyclinicError):  # noqa: N818
    """A message that was not accepted. `kind` is a stable name; the text describes the fault."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(f"{kind}: {sentence}")
        self.kind = kind
