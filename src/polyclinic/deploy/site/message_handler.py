"""Answers a server's messages at a site: one message in, one message out, and nothing else leaves the site.

`flower/client.py: SiteConnection` calls it for every message. It never raises for anything that a server sent. The
details of a failure are written to the site's own log; the server gets a sentence without any path, file name, label
or data of a patient. `policy.py` decides what may leave.
"""

import contextlib
import json
import logging
import shutil
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyclinic.algorithms.base import Algorithm
from polyclinic.config.recipe import Recipe
from polyclinic.core import DataError, PolyclinicError, Refused, StoreError, __version__, failpoint
from polyclinic.deploy.cohort import (
    FIELD,
    FIELDS,
    SIGNED,
    SiteCohort,
    Statement,
    hash_shared_kinds,
    hash_terms,
)
from polyclinic.deploy.site.config import SiteConfig, with_remedy
from polyclinic.deploy.site.images import build_site_profile, load_own_site
from polyclinic.deploy.site.keys import SiteKeys, erase_run_key, load_peers
from polyclinic.deploy.site.message_checks import (
    check_addressee,
    check_round_fields,
    read_recipe,
    read_run_id,
    read_terms,
)
from polyclinic.deploy.site.orders import (
    Order,
    OrderBook,
    RunHistory,
    RunRules,
    read_cached_reply,
    read_permission,
    reply_key,
)
from polyclinic.deploy.site.participation import Participation, RunTerms
from polyclinic.deploy.site.policy import (
    bind_approval,
    check_recipe,
    check_run_approved,
    find_approval,
    finish_run,
    read_approvals,
    recipe_digest,
)
from polyclinic.deploy.site.preview import ReleasePreview, preview_releases
from polyclinic.deploy.site.release_log import FAILED, LOG, REFUSED, ReleaseLog, RotatingLog, timestamp
from polyclinic.deploy.site.scores import KeptScores, describe_scores, keep_scores
from polyclinic.federation.secure_aggregation.agreements import AGREEMENTS, Agreements, MaskedSeeds
from polyclinic.federation.secure_aggregation.assembly import SiteIdentity
from polyclinic.federation.secure_aggregation.cohort import MASKS, PHASES
from polyclinic.runs.sites import FederatedDataset
from polyclinic.storage import messages
from polyclinic.storage.files import explain_os_errors, lock_folder, make_folder, write_atomically
from polyclinic.storage.signatures import Keyring
from polyclinic.storage.site_memory import DiskMemory, RamMemory

CARD, FAILURE = "card", "failure"
"""The kinds of a site's description of its images, which no policy withholds, and of a refusal after the work began."""
MOST_RUNS = 8
"""The most runs whose data a site keeps, so that a server that never ends one cannot fill the disk."""
MAX_MESSAGE, MAX_IDLE_MESSAGE = 4 << 30, 16 << 20
"""Bytes of a message from the server: at most, and while there is no run."""
log = logging.getLogger(__name__)


class SiteMessageHandler:
    """Answers messages for one site. All lasting state is in `config.folder`, so the object can be rebuilt at any time.

    `report` is called with a sentence about every request, refusal and failure."""

    def __init__(
        self, config: SiteConfig, report: Callable[[str], None] = lambda _: None, keyring: Keyring | None = None
    ) -> None:
        """`keyring`: this site's private key and the public keys of all sites; None: those of its kit."""
        self.config, self.site, self.report = config, config.site, report
        self.is_idle = True
        """Whether the site takes part in no run at the moment."""
        self.begun_runs = self.ended_runs = 0
        """How often this process has taken part in a run, and has heard that one is over."""
        self.keys = SiteKeys(config.folder)
        self.peers = load_peers(config, self._write_log)
        """The other sites' keys and this site's own; None without the files of a kit, as in a rehearsal."""
        self.keyring: Keyring | None = keyring or self.peers
        self.releases = ReleaseLog(config.folder)
        self.site_log = RotatingLog(config.folder / LOG)
        self.history = RunHistory(config.folder)
        self._attended: set[str] = set()
        """The runs, and recipes enrolled for, since whose last message the site has been connected all the time."""
        self._open: Participation | None = None
        self._images: tuple[str, FederatedDataset] | None = None
        self._at_work: Order | None = None
        """The order of the message that is being answered, once images are used for it."""
        make_folder(config.folder, 0o700)

    def answer_message(self, data: bytes) -> bytes:
        """Return the reply to a message, or a failure with one sentence."""
        run, self._at_work = "", None
        try:
            message = messages.decode(data)
            run = named if isinstance(named := message.fields.get("run"), str) else ""
            with with_remedy(), lock_folder(self.config.folder):
                return self._dispatch_message(message, data)
        except Refused as refusal:
            cause = "" if refusal.__cause__ is None else f" ({refusal.__cause__})"
            self._write_log(f"{REFUSED}, {_describe_run(run)}: {refusal}{cause}")
            return self._encode_failure(run, "refused", str(refusal))
        except PolyclinicError as error:
            self._write_log(f"{FAILED}, {_describe_run(run)}: {error}")
            return self._encode_failure(run, "error", self._public_reason(error))
        except Exception as error:
            defect = f"a mistake in polyclinic ({type(error).__name__}); {LOG} has the details for its makers"
            self._write_log(f"{FAILED}, {_describe_run(run)}: {defect}", traceback.format_exc())
            return self._encode_failure(
                run, "error", f"{self.site} met a mistake in its own program; its log has the details"
            )

    def largest_message(self) -> int:
        """The most bytes of a message that this site takes now: few without a run, during one what its recipe needs.

        After a restart it is not known which run goes on, so the first message may have MAX_MESSAGE bytes."""
        if self._open is not None:
            return self._open.largest_message
        return MAX_MESSAGE if any(self.config.folder.glob("runs/*/begin.pcl")) else MAX_IDLE_MESSAGE

    def note_absence(self) -> None:
        """Remember that rounds may have passed without this site: it was not connected, or slower than others."""
        self._attended.clear()

    def preview_releases(self, recipe: Recipe) -> list[ReleasePreview]:
        """List what would leave this site if the recipe were approved and ran; raises what a run would raise."""
        check_recipe(recipe, self.site, self.config.allow, self.config.budget, approved=None)
        rows = preview_releases(self._rehearse_run(recipe, self._load_images(recipe)))
        size = len(json.dumps(self.preview_card(recipe)))
        rows.append(ReleasePreview(CARD, "before the run", {}, size, "none; its content stands below"))
        if self.peers is not None:
            why = "name the networks and lists of sites that this site received; nothing in them depends on images"
            rows.append(ReleasePreview("signatures", "with every reply", {}, 0, why))
        return rows

    def preview_card(self, recipe: Recipe) -> dict[str, object]:
        """Return the description of this site's images that leaves before a run of the recipe, but for its keyed hash,
        in whose place stand words."""
        card = build_site_profile(self._load_images(recipe), self.site, __version__, "a keyed hash of the images")
        return {**card, "least_sites": self.config.allow.least_sites}

    def _rehearse_run(self, recipe: Recipe, own: FederatedDataset) -> Participation:
        """Take part in a run of this site alone, without training; raises `Refused` if the budget cannot pay for it."""
        terms = RunTerms("preview", recipe, own.classes, own.channels, own.size)
        part = Participation(self.config, terms, own, RamMemory(), lambda: 0)  # which draws no noise
        part.check_terms()
        if part.account is not None:
            part.account.check_whole_run()
        return part

    def _dispatch_message(self, message: messages.Message, data: bytes) -> bytes:
        purposes: dict[str, Callable[[messages.Message, bytes], bytes]] = {
            "enrol": self._handle_enrol,
            "begin": self._handle_begin,
            "train": self._handle_round,
            **dict.fromkeys(PHASES, self._handle_masks),
            "evaluate": self._handle_round,
            "end": self._handle_end,
        }
        purpose = check_addressee(message.fields, self.site)
        if purpose not in purposes:
            raise Refused("purpose", f"{messages.format_untrusted(purpose)} is nothing that a site does")
        reply = purposes[purpose](message, data)
        self.begun_runs += self.is_idle and purpose in ("begin", "train", "evaluate")
        self.is_idle = purpose in ("enrol", "end")
        return reply

    def _handle_enrol(self, message: messages.Message, _: bytes) -> bytes:
        recipe = self._read_allowed_recipe(message.fields)
        self._take_peers(message.fields)
        self._images = None  # the images may have changed since another run
        own = self._load_images(recipe)
        if not self._is_recipe_running(recipe):
            self.history.check_begin(self.site, self.config.allow)
            if self.config.budget is not None:
                self._rehearse_run(recipe, own)
        reply = self._encode_reply(
            "",
            card=build_site_profile(own, self.site, __version__, self.keys.mark_images(own.fingerprint)),
            least_sites=self.config.allow.least_sites,
        )
        self.releases.record_release(reply, {CARD: len(reply)}, run="", round=0, purpose="enrol", epsilon=None)
        self.history.record_enrolment(recipe_digest(recipe))
        self._attended.add(recipe_digest(recipe))
        self._write_log(f"enrolled for the recipe {recipe.name!r:.100} ({recipe.algorithm.name})")
        return reply

    def _handle_begin(self, message: messages.Message, data: bytes) -> bytes:
        """Join a run. The message is stored: after a restart the run continues under these terms, or not at all."""
        self._read_allowed_recipe(message.fields)
        self._take_peers(message.fields)
        terms = read_terms(message.fields, self.site)
        kept = self._run_folder(terms.run) / "begin.pcl"
        if kept.exists() and self._load_terms(terms.run).digest != terms.digest:
            raise Refused("run", f"{self.site} has begun the run {terms.run} under other terms; end it first")
        approvals = read_approvals(self.config.folder)
        approval = find_approval(terms.recipe_digest, terms.run, kept.exists(), self.site, approvals)
        if not kept.exists():
            self.history.check_begin(self.site, self.config.allow)
        part, seeds = self._join_run(terms), MaskedSeeds(self.config.folder)
        part.check_terms()
        masked = part.mask is not None and part.mask.masks
        if masked and not kept.exists():
            seeds.check_new(terms.recipe.seed, self.site)
        if part.account is not None:
            part.account.check_whole_run()
        bind_approval(self.config.folder, approval, terms.run)
        failpoint("approval-bound")
        if not kept.exists():
            begun = sorted((self.config.folder / "runs").glob("*/begin.pcl"), key=lambda path: path.stat().st_mtime)
            for oldest in begun[: max(0, len(begun) - MOST_RUNS + 1)]:
                self._clear_run_folder(oldest.parent)
            make_folder(kept.parent, 0o700)
            write_atomically(kept.with_name("images"), self.keys.mark_images(part.setup.dataset.fingerprint).encode())
            if terms.recipe.privacy is not None or part.mask is not None:
                self.keys.begin_run(kept.parent, terms.digest)
            self.history.record_begin()
            write_atomically(kept, data)
            failpoint("run-begun")
            if terms.recipe_digest in self._attended or not self.history.has_enrolled(terms.recipe_digest):
                self._attended.add(terms.run)  # else rounds may have passed since it enrolled
            self._write_log(f"began run {terms.run}: {terms.recipe.name!r:.100} ({terms.recipe.algorithm.name})")
        if masked:
            seeds.record(terms.recipe.seed, terms.run)
        cohort = self._cohort(terms.run)
        signed = {} if cohort is None else cohort.sign_terms(hash_terms(message.fields))
        return self._encode_reply(terms.run, ready=True, **signed)

    def _handle_round(self, message: messages.Message, _: bytes) -> bytes:
        """Train for a round, or predict. The last order again gets the same bytes again, and costs nothing."""
        fields, run = message.fields, read_run_id(message.fields)
        part = self._open_participation(run)
        check_round_fields(fields, part.recipe, self.site)
        purpose, order = str(fields["purpose"]), Order.from_message(message)
        kept, book = self._run_folder(run) / f"last-{purpose}", self._open_book(part)
        book.check(order, was_away=run not in self._attended)
        asked = reply_key(order, fields)
        former, cohort = read_cached_reply(kept, asked), self._check_cohort(run, order.round, fields)
        if former is None:
            part.check_order(message)
            self._record_order(book, order, run)
            answer = part.train(message) if purpose == "train" else self._evaluate(part, message)
        else:
            answer = messages.decode(former)
        kinds = part.check_reply(answer)
        if cohort is not None and purpose == "train":
            signed = _sign_order(cohort, message, part.setup.algorithm)
            if answer.fields.get(FIELD) != signed:  # the order was repeated with statements of other sites
                answer, former = messages.Message({**answer.fields, FIELD: signed}, answer.tensors), None
        reply = former or messages.encode(answer.fields, answer.tensors)
        self._attended.add(run)
        spent = part.account.epsilon_spent() if part.account is not None and purpose == "train" else None
        self.releases.record_release(reply, kinds, run=run, round=order.round, purpose=purpose, epsilon=spent)
        if former is None:
            write_atomically(kept, asked.encode() + reply)
        return reply

    def _record_order(self, book: OrderBook, order: Order, run: str) -> None:
        """Enter an order before any image is used for it, so that a refusal or failure counts as an answer, too."""
        book.record(order)
        if order.purpose == "evaluate":
            finish_run(self.config.folder, run, timestamp())
        self._at_work = order
        failpoint("order-recorded")

    def _handle_masks(self, message: messages.Message, _: bytes) -> bytes:
        """Exchange keys and shares for masks. Nothing in the reply depends on images, and all of it can be repeated."""
        fields, run = message.fields, read_run_id(message.fields)
        part = self._open_participation(run)
        check_round_fields(fields, part.recipe, self.site)
        answer = part.exchange_masks(message)
        reply = messages.encode(answer.fields, answer.tensors)
        purpose, round = str(fields["purpose"]), int(fields["round"])
        self.releases.record_release(reply, {MASKS: len(reply)}, run=run, round=round, purpose=purpose, epsilon=None)
        return reply

    def _evaluate(self, part: Participation, message: messages.Message) -> messages.Message:
        """Score the final models, keep the scores for the site's own people, and return what may leave of them."""
        found, run, rounds = part.evaluate(message), read_run_id(message.fields), int(message.fields["round"]) - 1
        kept = KeptScores(
            run=run,
            recipe=part.recipe.name,
            algorithm=part.recipe.algorithm.name,
            rounds=rounds,
            time=timestamp(),
            headline=found.headline,
            scores=found.scores,
            withheld=found.withheld,
            predictions_sent=bool(found.tensors),
            classes=part.terms.classes,
        )
        keep_scores(self.config.folder, kept)
        self._write_log(describe_scores(kept))
        fields = {"run": run, "round": message.fields["round"], "site": self.site, **found.answer}
        return messages.Message(fields, found.tensors)

    def _open_book(self, part: Participation) -> OrderBook:
        run, allow = part.terms.run, self.config.allow
        return OrderBook(
            self._run_folder(run), RunRules.from_recipe(part.recipe, allow, self.site, run, part.takes_part)
        )

    def _take_peers(self, fields: Mapping[str, object]) -> None:
        """Take a newer list of sites from the server, if it is the authority's."""
        if self.peers is not None and "peers" in fields:
            self.peers.take_list(fields["peers"])

    def _cohort(self, run: str) -> SiteCohort | None:
        """The statements of this run's sites; None where the other sites' keys are not known."""
        if self.peers is None:
            return None
        path = self._run_folder(run) / SIGNED
        return SiteCohort(self.config.federation, run, path, self.peers.signer, self.peers.keys)

    def _check_cohort(self, run: str, round: int, fields: Mapping[str, object]) -> SiteCohort | None:
        """Raise `Refused` unless enough sites took part in the round before, with the same weights."""
        cohort, least = self._cohort(run), self.config.allow.least_sites
        if cohort is not None:
            cohort.check(round, fields.get(FIELDS, {}), least)
        elif least > 1:
            raise Refused(
                "cohort",
                f"{self.site} asks for {least} sites, but has no keys of others by which to count them; use the files "
                "of its kit, or set allow.least_sites: 1 in its site.yaml for a rehearsal",
            )
        return cohort

    def _handle_end(self, message: messages.Message, _: bytes) -> bytes:
        run = read_run_id(message.fields)
        self.ended_runs += (self._run_folder(run) / "begin.pcl").exists()
        if self._open is not None and self._open.terms.run == run:
            self._open = None
        self._clear_run_folder(self._run_folder(run))
        dropped = message.fields.get("not begun")
        self._write_log(f"ended run {run}" if dropped is None else f"no run begins: {str(dropped)[:300]}")
        return self._encode_reply(run, ended=True)

    def _read_allowed_recipe(self, fields: Mapping[str, object]) -> Recipe:
        recipe = read_recipe(fields, self.site)
        check_recipe(recipe, self.site, self.config.allow, self.config.budget, self._approved_recipes())
        return recipe

    def _approved_recipes(self) -> set[str]:
        return {approval.digest for approval in read_approvals(self.config.folder)}

    def _open_participation(self, run: str) -> Participation:
        """The participation in a run that has an approval: from memory, or restored from its stored terms."""
        if not (self._run_folder(run) / "begin.pcl").exists():
            raise Refused("run", f"{self.site} knows of no run {run}; begin it first")
        found = self._open if self._open is not None and self._open.terms.run == run else None
        terms = self._load_terms(run) if found is None else found.terms
        check_run_approved(terms.recipe_digest, run, self.site, read_approvals(self.config.folder))
        return found or self._join_run(terms)

    def _is_recipe_running(self, recipe: Recipe) -> bool:
        """Whether a run of this recipe has begun here; whether the rest of it can be paid for, `begin` checks."""
        for kept in (self.config.folder / "runs").glob("*/begin.pcl"):
            with contextlib.suppress(PolyclinicError):
                if recipe_digest(self._load_terms(kept.parent.name).recipe) == recipe_digest(recipe):
                    return True
        return False

    def _load_terms(self, run: str) -> RunTerms:
        path = self._run_folder(run) / "begin.pcl"
        try:
            terms = read_terms(messages.decode(path.read_bytes()).fields, self.site)
        except (OSError, Refused) as error:
            raise StoreError(
                f"{path} cannot be read ({error}); remove its folder and have the run begun anew"
            ) from None
        allow, approved = self.config.allow, self._approved_recipes()  # which may have changed
        check_recipe(terms.recipe, self.site, allow, self.config.budget, approved)
        return terms

    def _join_run(self, terms: RunTerms) -> Participation:
        if self._open is not None and self._open.terms.digest == terms.digest:
            return self._open
        own = self._load_images(terms.recipe)
        self._check_images(own, terms)
        self._open = None  # the networks of one run at a time
        run = self._run_folder(terms.run)
        self._open = Participation(
            self.config,
            terms,
            own,
            DiskMemory(run / "memory"),
            lambda: self.keys.read_run_key(run),
            self._find_identity(run),
            lambda round: read_permission(run, round),
        )
        return self._open

    def _find_identity(self, run: Path) -> SiteIdentity | None:
        """Return what this site needs to mask its updates of a run; None if it knows no keys of other sites."""
        if self.keyring is None:
            return None
        signer, peers = self.keyring.signer, self.keyring.keys
        agreements = Agreements(run / AGREEMENTS)
        bound = agreements, self.config.allow.least_sites
        return SiteIdentity(signer, peers, lambda: self.keys.read_run_key(run).to_bytes(32), *bound, self._write_log)

    def _check_images(self, own: FederatedDataset, terms: RunTerms) -> None:
        """Raise `Refused` if the images have other classes or shapes than the run, or changed since it began."""
        if own.classes != terms.classes:
            ours, theirs = ", ".join(own.classes), ", ".join(terms.classes)
            raise Refused("data", f"{self.site}'s images have other classes than this run") from DataError(
                f"the images have the classes {ours}, the run {theirs}; correct the labels, or have data.classes or "
                "data.task name them in the recipe"
            )
        if (own.channels, own.size) != (terms.channels, terms.size):
            raise Refused("data", f"{self.site}'s images have another shape than this run's")
        known = self._run_folder(terms.run) / "images"
        if known.exists() and known.read_text() != self.keys.mark_images(own.fingerprint):
            raise Refused("data", f"{self.site} has other images than when this run began; start it anew")

    def _load_images(self, recipe: Recipe) -> FederatedDataset:
        """Load the images, or return those of the previous message."""
        group = None if recipe.privacy is None else recipe.privacy.group
        key = f"{recipe.seed}|{group}|{recipe.data.model_dump_json()}"
        if self._images is None or self._images[0] != key:
            self._images = key, load_own_site(recipe, self.config).limit_group(group)
        return self._images[1]

    def _run_folder(self, run: str) -> Path:
        return self.config.folder / "runs" / run

    def _clear_run_folder(self, folder: Path) -> None:
        """End a run: use up its approval, then delete its data, its key first, except scores that the site may read."""
        finish_run(self.config.folder, folder.name, timestamp())
        erase_run_key(folder)
        with explain_os_errors(folder):
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

    def _encode_reply(self, run: str, **fields: Any) -> bytes:
        return messages.encode({"run": run, "site": self.site, **fields}, {})

    def _encode_failure(self, run: str, kind: str, why: str) -> bytes:
        """The reply that says why there is no other, which the log of releases has, if images were used before."""
        reply, order = self._encode_reply(run[:64], failure=kind, why=why[:500]), self._at_work
        if order is not None:
            with contextlib.suppress(StoreError), lock_folder(self.config.folder):
                self.releases.record_release(
                    reply, {FAILURE: len(reply)}, run=run, round=order.round, purpose=order.purpose, epsilon=None
                )
        return reply

    def _public_reason(self, error: PolyclinicError) -> str:
        if isinstance(error, DataError):
            return f"{self.site}'s images cannot be used for this recipe as they are; its own log says why"
        if isinstance(error, StoreError):
            return f"{self.site} cannot write or read its own folder; its own terminal or log says why"
        return f"{self.site} cannot do this; its own log says why"

    def _write_log(self, sentence: str, details: str = "") -> None:
        """Write to the site's own log. A full disk must not prevent the reply to the server."""
        sentence = "".join(letter if letter.isprintable() else " " for letter in sentence)
        log.info("%s: %s", self.site, sentence)
        self.report(sentence)
        with contextlib.suppress(StoreError):
            self.site_log.append_line("\n".join(filter(None, (f"{timestamp()} {sentence}", details))))


def _sign_order(cohort: SiteCohort, order: messages.Message, algorithm: Algorithm) -> Statement:
    """Return this site's statement on what it received."""
    weights, cluster = hash_shared_kinds(algorithm, order.tensors), algorithm.cluster_from_broadcast(order.tensors)
    return cohort.sign_round(int(order.fields["round"]), cluster, weights, order.fields.get(FIELDS, {}))


def _describe_run(run: str) -> str:
    return f"run {messages.format_untrusted(run)}" if run else "no run"
