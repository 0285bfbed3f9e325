"""The site's whole work: one message in, one message out, and nothing else leaves.

The desk never raises for anything that a server sent. What went wrong stands in the site's own log, in full; the server
is told a sentence that holds no path, no file's name, no label, and nothing of a patient.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyclinic import __version__
from polyclinic.config.recipe import Recipe
from polyclinic.core.errors import DataError, PolyclinicError, Refused, StoreError
from polyclinic.deploy.site.config import SiteConfig, remedied
from polyclinic.deploy.site.images import card_of, gather_own
from polyclinic.deploy.site.message_checks import addressed, check_order, recipe_of, run_of, terms_of
from polyclinic.deploy.site.participation import Participation, ReleasePreview, Terms
from polyclinic.deploy.site.policy import recipe_mark, refuse_recipe
from polyclinic.deploy.site.release_log import FAILED, LOG, REFUSED, Releases, RotatingLog, now
from polyclinic.runs.sites import FederatedDataset
from polyclinic.storage import messages
from polyclinic.storage.run_files import DiskMemory, RamMemory, locked, named_failure, write_atomically

CARD = "card"
"""What a site says of itself: the one kind that no policy can keep back, for without it there is no run."""
MOST_RUNS = 8
"""Of which a site remembers something; a server that never ends any shall not fill the disk."""
DIGEST = 64
log = logging.getLogger(__name__)


class SiteMessageHandler:
    """Answers for one site. What must survive lies under `config.folder`: this object may be made anew at any time.

    `tell` says in a sentence, to whoever watches this site, what was asked, refused, and what failed."""

    def __init__(self, config: SiteConfig, tell: Callable[[str], None] = lambda _: None) -> None:
        self.config, self.site, self.tell = config, config.site, tell
        self.resting = True
        """Whether no run is under way here."""
        self.releases = Releases(config.folder)
        self.notebook = RotatingLog(config.folder / LOG)
        self._open: tuple[str, Participation] | None = None
        self._images: tuple[str, tuple[str, ...] | None, FederatedDataset] | None = None
        with named_failure(config.folder):
            config.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def answer(self, data: bytes) -> bytes:
        """The reply to a message, or a failure with one sentence."""
        run = ""
        try:
            order = messages.decode(data)
            run = named if isinstance(named := order.fields.get("run"), str) else ""
            with remedied(), locked(self.config.folder):
                return self._answer(order, data)
        except Refused as refusal:
            self._log(f"{REFUSED}, {_told(run)}: {refusal}{_because(refusal)}")
            return self._failure(run, "refused", str(refusal))
        except PolyclinicError as error:
            self._log(f"{FAILED}, {_told(run)}: {error}")
            return self._failure(run, "error", self._sentence(error))
        except Exception:
            self._log(f"{FAILED}, {_told(run)}: {_mistake()}", traceback.format_exc())
            return self._failure(run, "error", f"{self.site} met a mistake in its own program; its log has the details")

    def preview(self, recipe: Recipe) -> list[ReleasePreview]:
        """What would leave this site if the recipe ran, kind by kind; nothing leaves. Raises what the desk would."""
        refuse_recipe(recipe, self.site, self.config.allow, self.config.budget)
        return self._rehearsed(recipe, self._gathered(recipe)).preview()

    def _rehearsed(self, recipe: Recipe, own: FederatedDataset) -> Participation:
        """A run with nobody else in it, priced, if the budget can pay it."""
        terms = Terms("preview", recipe, own.classes, own.channels, own.size)
        part = Participation(self.config, terms, own, RamMemory())
        if part.account is not None:
            part.account.refuse_run()
        return part

    def _answer(self, order: messages.Message, data: bytes) -> bytes:
        purposes: dict[str, Callable[[messages.Message, bytes], bytes]] = {
            "enrol": self._enrol,
            "begin": self._begin,
            "train": self._play,
            "evaluate": self._play,
            "end": self._end,
        }
        purpose = addressed(order.fields, self.site)
        if purpose not in purposes:
            raise Refused("purpose", f"{messages.shown(purpose)} is nothing that a site does")
        reply = purposes[purpose](order, data)
        self.resting = purpose in ("enrol", "end")
        return reply

    def _enrol(self, order: messages.Message, data: bytes) -> bytes:
        del data
        recipe = self._allowed(order.fields)
        self._images = None  # they may have changed since another run
        own = self._gathered(recipe)
        if self.config.budget is not None and not self._under_way(recipe):
            self._rehearsed(recipe, own)
        reply = self._reply("", card=card_of(own, self.site, __version__, self._mark(own)))
        self.releases.note(reply, {CARD: len(reply)}, run="", round=0, purpose="enrol", epsilon=None)
        self._log(f"enrolled for the recipe {recipe.name!r:.100} ({recipe.algorithm.name})")
        return reply

    def _begin(self, order: messages.Message, data: bytes) -> bytes:
        """Kept as it came: whatever happens to this process, the run goes on under these terms or not at all."""
        self._allowed(order.fields)
        terms = terms_of(order.fields, self.site)
        kept = self._folder(terms.run) / "begin.pcl"
        if kept.exists() and self._kept_terms(terms.run).mark != terms.mark:
            raise Refused("run", f"{self.site} has begun the run {terms.run} under other terms; end it first")
        part = self._participation(terms)
        if part.account is not None:
            part.account.refuse_run()
        if not kept.exists():
            self._forget_oldest()
            with named_failure(kept):
                kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(kept.with_name("images"), self._mark(part.consortium).encode())
            write_atomically(kept, data)
            self._log(f"began run {terms.run}: {terms.recipe.name!r:.100} ({terms.recipe.algorithm.name})")
        return self._reply(terms.run, ready=True)

    def _play(self, order: messages.Message, data: bytes) -> bytes:
        """A round, or predictions. The same message again gets the same bytes again, and costs nothing."""
        fields, run = order.fields, run_of(order.fields)
        part = self._begun(run)
        check_order(fields, part.recipe, self.site)
        purpose, round = str(fields["purpose"]), int(fields["round"])
        kept, asked = self._folder(run) / f"last-{purpose}", hashlib.sha256(data).hexdigest()
        reply = _same(kept, asked)
        repeated = reply is not None
        if reply is None:
            message = part.train(order) if purpose == "train" else part.evaluate(order)
            kinds = part.refuse_excess(message)
            reply = messages.encode(message.fields, message.tensors)
        else:
            kinds = part.refuse_excess(messages.decode(reply))
        spent = part.account.spent() if part.account is not None and purpose == "train" else None
        self.releases.note(reply, kinds, run=run, round=round, purpose=purpose, epsilon=spent, repeated=repeated)
        if not repeated:
            write_atomically(kept, asked.encode() + reply)
        return reply

    def _end(self, order: messages.Message, data: bytes) -> bytes:
        del data
        run = run_of(order.fields)
        if self._open is not None and self._open[0] == run:
            self._open = None
        self._forget(self._folder(run))
        self._log(f"ended run {run}")
        return self._reply(run, ended=True)

    def _allowed(self, fields: Mapping[str, Any]) -> Recipe:
        recipe = recipe_of(fields, self.site)
        refuse_recipe(recipe, self.site, self.config.allow, self.config.budget)
        return recipe

    def _begun(self, run: str) -> Participation:
        """The run that goes on: as it is in memory, or as it was kept."""
        if self._open is not None and self._open[0] == run:
            return self._open[1]
        if not (self._folder(run) / "begin.pcl").exists():
            raise Refused("run", f"{self.site} knows of no run {run}; begin it first")
        return self._participation(self._kept_terms(run))

    def _under_way(self, recipe: Recipe) -> bool:
        """Whether a run of it goes on here, perhaps half paid already: whether the rest can be paid, `begin` looks."""
        for kept in (self.config.folder / "runs").glob("*/begin.pcl"):
            with contextlib.suppress(PolyclinicError):
                if recipe_mark(self._kept_terms(kept.parent.name).recipe) == recipe_mark(recipe):
                    return True
        return False

    def _kept_terms(self, run: str) -> Terms:
        path = self._folder(run) / "begin.pcl"
        try:
            terms = terms_of(messages.decode(path.read_bytes()).fields, self.site)
        except (OSError, Refused) as error:
            raise StoreError(
                f"{path} cannot be read ({error}); remove its folder and have the run begun anew"
            ) from None
        refuse_recipe(terms.recipe, self.site, self.config.allow, self.config.budget)  # it may have changed since
        return terms

    def _participation(self, terms: Terms) -> Participation:
        if self._open is not None and self._open[1].terms.mark == terms.mark:
            return self._open[1]
        own = self._gathered(terms.recipe, terms.classes)
        self._refuse_misfit(own, terms)
        self._open = None  # the networks of one run at a time
        memory = DiskMemory(self._folder(terms.run) / "memory")
        self._open = terms.run, Participation(self.config, terms, own, memory)
        return self._open[1]

    def _refuse_misfit(self, own: FederatedDataset, terms: Terms) -> None:
        """Images of other classes or another shape than the run's, or other images than it began with."""
        if own.classes != terms.classes:
            ours, theirs = ", ".join(own.classes), ", ".join(terms.classes)
            raise Refused("data", f"{self.site}'s images have other classes than this run") from DataError(
                f"the images have the classes {ours}, the run {theirs}; correct the labels, or have data.classes or "
                "data.task name them in the recipe"
            )
        if (own.channels, own.size) != (terms.channels, terms.size):
            raise Refused("data", f"{self.site}'s images have another shape than this run's")
        known = self._folder(terms.run) / "images"
        if known.exists() and known.read_text() != self._mark(own):
            raise Refused("data", f"{self.site} has other images than when this run began; start it anew")

    def _gathered(self, recipe: Recipe, classes: Sequence[str] | None = None) -> FederatedDataset:
        """The images, kept in memory from one message to the next."""
        key, named = f"{recipe.seed}|{recipe.data.model_dump_json()}", None if classes is None else tuple(classes)
        if self._images is not None and self._images[0] == key:
            _, given, found = self._images
            if named in (given, found.classes):  # whether they were given or follow from the labels
                return found
        self._images = key, named, gather_own(recipe, self.config, named)
        return self._images[2]

    def _mark(self, own: FederatedDataset) -> str:
        """By which the server sees that images changed, and nothing else."""
        secret = self.config.secret().to_bytes(32, "big")
        return hmac.new(secret, own.fingerprint.encode(), hashlib.sha256).hexdigest()

    def _folder(self, run: str) -> Path:
        return self.config.folder / "runs" / run

    def _forget(self, folder: Path) -> None:
        """All but what was filed for the site's own people to read."""
        with named_failure(folder):
            for path in folder.glob("*"):
                if path.name == "memory" and any(path.glob("*/scores")):
                    for old in path.glob("*/*.pcl"):
                        old.unlink(missing_ok=True)
                elif path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _forget_oldest(self) -> None:
        begun = sorted((self.config.folder / "runs").glob("*/begin.pcl"), key=lambda path: path.stat().st_mtime)
        for old in begun[: max(0, len(begun) - MOST_RUNS + 1)]:
            self._forget(old.parent)

    def _reply(self, run: str, **fields: Any) -> bytes:
        return messages.encode({"run": run, "site": self.site, **fields}, {})

    def _failure(self, run: str, kind: str, why: str) -> bytes:
        return self._reply(run[:64], failure=kind, why=why[:500])

    def _sentence(self, error: PolyclinicError) -> str:
        if isinstance(error, DataError):
            return f"{self.site}'s images cannot be used for this recipe as they are; its own log says why"
        if isinstance(error, StoreError):
            return f"{self.site} cannot write or read its own folder; its own terminal or log says why"
        return f"{self.site} cannot do this; its own log says why"

    def _log(self, sentence: str, details: str = "") -> None:
        """For the hospital alone. A disk that is full shall not keep the server from being told."""
        sentence = "".join(letter if letter.isprintable() else " " for letter in sentence)
        log.info("%s: %s", self.site, sentence)
        self.tell(sentence)
        with contextlib.suppress(StoreError):
            self.notebook.write("\n".join(filter(None, (f"{now()} {sentence}", details))))


def _same(kept: Path, asked: str) -> bytes | None:
    """The reply to the last message of its kind, if this is that message."""
    try:
        with open(kept, "rb") as file:
            if file.read(DIGEST) != asked.encode():
                return None
            reply = file.read()
        messages.decode(reply)
    except (OSError, Refused):
        return None
    return reply


def _mistake() -> str:
    return f"a mistake in polyclinic ({type(sys.exception()).__name__}); {LOG} has the details for its makers"


def _told(run: str) -> str:
    return f"run {messages.shown(run)}" if run else "no run"


def _because(refusal: Refused) -> str:
    return f" ({refusal.__cause__})" if refusal.__cause__ is not None else ""
