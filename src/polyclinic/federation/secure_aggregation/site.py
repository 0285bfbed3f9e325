"""A site's part in a masked round: it answers `keys`, `shares`, `agree` and `unmask`, and masks its update in `train`.

Everything is derived again from the site's key of the run for every message, so that a site that was killed goes on.
Nothing but `Agreements` is remembered.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from polyclinic.core import Bundle, Refused, SiteId, Stream, failpoint
from polyclinic.federation.secure_aggregation.agreements import Agreements
from polyclinic.federation.secure_aggregation.cohort import (
    MASKS,
    Cohort,
    RoundKeys,
    decode_bytes,
    encode_bytes,
    hash_kinds,
    read_attempt,
    read_sites,
    read_texts,
)
from polyclinic.federation.secure_aggregation.commitments import hash_seed, hash_shares
from polyclinic.privacy.masking.fixed_point import Words, as_tensor, grid_of, quantise_group
from polyclinic.privacy.masking.masks import add_mask, neighbours_of, pair_sign
from polyclinic.privacy.masking.secrets import RoundSecrets, derive_key
from polyclinic.privacy.masking.shamir import split_secret
from polyclinic.privacy.mechanism import clip, gaussian_noise, join_kinds, split_kinds
from polyclinic.privacy.transforms.mask import SUM, Mask
from polyclinic.storage.messages import Fields, Message
from polyclinic.storage.signatures import PeerKeys, SiteSigner

FINEST = 100
"""The least standard deviation of noise in steps of the grid, so that rounding it does not show."""
LARGEST_NOISE = 10.0
"""No sum of noise is farther from 0 than so many of its standard deviations."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MaskingSite:
    """Masks the updates of one site.

    Args:
        signer: The site and its private key.
        peers: The public keys of all sites.
        read_key: Returns the site's key of the run, 32 bytes.
        options: The stage `mask` of the recipe.
        weight: The site's weight in the mean.
        unweighted: The kinds of which all sites have the same weight.
        agreements: What the site has bound itself to.
        least_sites: The smallest number of sites whose sum may hold this site's update.
        noise: The standard deviation of the noise that this site adds to its parameters, its share of a plan's.
        tell: Called with what the site's own people should know, and nobody else.
    """

    signer: SiteSigner
    peers: PeerKeys
    read_key: Callable[[], bytes]
    options: Mask
    weight: float
    unweighted: frozenset[str] = frozenset()
    agreements: Agreements = field(default_factory=Agreements)
    least_sites: int = 2
    noise: float = 0.0
    tell: Callable[[str], None] = log.warning

    @property
    def site(self) -> SiteId:
        return self.signer.site

    def answer(self, order: Message) -> Message:
        """Return the reply to a message of one of the `PHASES`."""
        fields = order.fields
        answers = {
            "keys": self._make_keys,
            "shares": self._share_secrets,
            "agree": self._agree_survivors,
            "unmask": self._reveal_shares,
        }
        found = answers[fields["purpose"]](fields, read_masks(fields))
        reply = {"run": fields["run"], "round": fields["round"], "site": self.site, MASKS: found}
        return Message(reply, {})

    def check_order(self, order: Message) -> None:
        """Raise `Refused` unless the weights of a `train` order are those that all sites of its cohort have signed."""
        if order.fields["purpose"] == "train":
            self._read_masked_with(order.fields, self._read_cohort(order.fields, hash_kinds(order.tensors)))

    def mask_update(self, order: Message, update: Bundle, secret: Stream | None) -> tuple[Bundle, Fields]:
        """Return a site's update as masked integers, and what goes into the field `masks` of its reply.

        That is a signature, and the sites whose shares this one cannot read.

        Args:
            order: The order for the round.
            update: The new values by kind.
            secret: The source of the noise under a privacy plan.
        """
        cohort = self._read_cohort(order.fields, None)
        masked_with = self._read_masked_with(order.fields, cohort)
        self._bind_sites(cohort, masked_with)
        vectors = self._quantise(update, order.tensors, cohort, len(masked_with), secret)
        if self.options.masks:
            self._add_masks(vectors, cohort, masked_with)
        failpoint("update-masked")
        signature = self.signer.sign("masked", cohort.masked_statement(self.site, masked_with))
        tensors = {kind: {SUM: as_tensor(vectors[kind])} if kind in vectors else {} for kind in update}
        opened = self._open_all(cohort, masked_with, read_masks(order.fields))
        return tensors, {
            "signature": signature,
            "unreadable": sorted(set(self._holders_in(masked_with, cohort)) - {*opened}),
        }

    def _make_keys(self, fields: Fields, masks: Fields) -> Fields:
        """Return the site's keys for this round and these weights, signed."""
        received, attempt = read_texts(masks.get("received")), read_attempt(masks)
        secrets = self._secrets(fields, received, attempt)
        mask_key, cipher_key = (k.public_key().public_bytes_raw() for k in (secrets.mask_key, secrets.cipher_key))
        own = RoundKeys(received, attempt, self.weight, mask_key, cipher_key)
        signed = self.signer.sign("keys", own.statement(str(fields["run"]), int(fields["round"]), self.site))
        failpoint("keys-made")
        return {**own.to_json(), "signature": signed}

    def _share_secrets(self, fields: Fields, masks: Fields) -> Fields:
        """Return shares of the site's secrets, encrypted for its neighbours."""
        cohort = self._read_cohort(fields, None)
        self._check_room(len(cohort.keys))
        secrets, holders = self._secrets_in(cohort), self._neighbours(cohort)
        shares = self._split(secrets, cohort, [*holders, self.site])
        sealed = {
            other: encode_bytes(
                secrets.seal_shares(cohort.keys[other].cipher_key, cohort.digest, (self.site, other), shares[other])
            )
            for other in holders
        }
        failpoint("secrets-shared")
        hashes = {other: hash_shares(cohort.digest, self.site, other, found) for other, found in shares.items()}
        seed = hash_seed(cohort.digest, self.site, secrets.own_seed(cohort.digest))
        return {"sealed": sealed, "hashes": hashes, "seed": seed}

    def _agree_survivors(self, fields: Fields, masks: Fields) -> Fields:
        """Sign the list of survivors, the only one that this site signs in this round."""
        cohort = self._read_cohort(fields, None)
        masked_with, survivors = self._read_survivors(fields, cohort)
        failpoint("survivors-recorded")
        signature = self.signer.sign("survivors", cohort.survivors_statement(masked_with, survivors))
        return {"signature": signature}

    def _reveal_shares(self, fields: Fields, masks: Fields) -> Fields:
        """Return shares of the survivors' own masks, and of the lost sites' mask keys: never both of one site."""
        cohort = self._read_cohort(fields, None)
        masked_with, survivors = self._read_survivors(fields, cohort)
        signed = read_texts(masks.get("agreed"))
        for site, signature in signed.items():
            if site not in survivors:
                raise Refused("agreement", f"{site[:60]} signed the list of survivors, but is not on it")
            self.peers.verify(site, "survivors", cohort.survivors_statement(masked_with, survivors), signature)
        if len(signed) < self.options.threshold_of(len(cohort.keys)):
            raise Refused("agreement", f"{len(signed)} sites have signed the list of survivors, which are too few")
        own: dict[str, str] = {}
        lost: dict[str, str] = {}
        for other, shares in self._open_all(cohort, masked_with, masks).items():
            target, value = (own, shares[1]) if other in survivors else (lost, shares[0])
            target[other] = f"{value:x}"
        failpoint("shares-revealed")
        return {"own": own, "lost": lost}

    def _open_all(self, cohort: Cohort, masked_with: Sequence[SiteId], masks: Fields) -> dict[SiteId, tuple[int, int]]:
        """Return this site's shares of the mask key and own mask of itself and of each dealer whose it can read."""
        sealed, hashes = (read_texts(masks.get(name, {})) for name in ("sealed", "hashes"))
        secrets = self._secrets_in(cohort)
        found = self._split(secrets, cohort, [self.site])
        for dealer in self._holders_in(masked_with, cohort):
            shares = self._open_shares(secrets, cohort, dealer, sealed.get(dealer))
            if shares is not None and hash_shares(cohort.digest, dealer, self.site, shares) == hashes.get(dealer):
                found[dealer] = shares
        return found

    def _open_shares(
        self, secrets: RoundSecrets, cohort: Cohort, dealer: SiteId, sealed: str | None
    ) -> tuple[int, int] | None:
        with contextlib.suppress(Refused):  # what a dealer has not even written in base64
            route = dealer, self.site
            return secrets.open_shares(cohort.keys[dealer].cipher_key, cohort.digest, route, decode_bytes(sealed))
        return None

    def _split(self, secrets: RoundSecrets, cohort: Cohort, holders: Sequence[SiteId]) -> dict[SiteId, tuple[int, int]]:
        """Return the shares of this site's mask key and own mask by holder."""
        threshold = self.options.share_threshold(len(cohort.keys))
        points = [cohort.point_of(holder) for holder in holders]
        parts = [
            split_secret(secret, secrets.coefficients(cohort.digest, name, threshold), points)
            for name, secret in zip(("mask key", "own mask"), secrets.shared_secrets(cohort.digest), strict=True)
        ]
        return dict(zip(holders, zip(*parts, strict=True), strict=True))

    def _quantise(
        self, update: Bundle, received: Bundle, cohort: Cohort, summands: int, secret: Stream | None
    ) -> dict[str, Words]:
        """Return the update's integers by kind, with this site's share of the noise in those of the parameters.

        What the sum could not carry is brought into range, and said to the site's own people only: the server gets a
        masked update in any case, and so not even the fact that a value was out of range.
        """
        self._check_room(summands)
        if self.options.bound is not None:
            clipped, _ = clip(join_kinds(update, ("model",)), self.options.bound, join_kinds(received, ("model",)))
            update = split_kinds(clipped, update, ("model",))
        vectors: dict[str, Words] = {}
        changed = 0
        for kind, group in sorted(update.items()):
            if group:
                weight = 1.0 if kind in self.unweighted else self.weight / cohort.largest_weight
                limit = grid_of(kind).limit(summands, self._noise_reach(summands) if kind == "model" else 0.0)
                vectors[kind], found = quantise_group(kind, group, received.get(kind, {}), weight, limit)
                changed += found
        if changed:
            self.tell(
                f"{changed} values of the update of {self.site} in round {cohort.round} were not finite, or farther "
                "from 0 than masked sums carry, and were brought into range; if it goes on, lower the learning rate"
            )
        if self.noise:
            assert secret is not None
            step, model = grid_of("model").step, vectors["model"]
            drawn = gaussian_noise((len(model),), self.noise / step, secret.child("masked noise")).round_()
            np.add(model, drawn.numpy().astype(np.int64).astype(model.dtype), out=model)
        return vectors

    def _noise_reach(self, summands: int) -> float:
        """Return how far from 0 the rounded noise of so many sites together may come, in steps of the grid."""
        drawn = LARGEST_NOISE * math.sqrt(summands) * self.noise / grid_of("model").step
        return drawn + summands / 2 if drawn else 0.0

    def _check_room(self, summands: int) -> None:
        """Raise `Refused` if the noise of so many sites leaves no room for their updates, whatever these are."""
        if grid_of("model").limit(summands, self._noise_reach(summands)) < 1:
            raise Refused(
                "privacy",
                f"the noise of {summands} sites is more than masked sums carry; lower privacy.clip, or raise "
                "privacy.epsilon",
            )

    def _add_masks(self, vectors: dict[str, Words], cohort: Cohort, masked_with: Sequence[SiteId]) -> None:
        secrets = self._secrets_in(cohort)
        add_mask(vectors, secrets.own_seed(cohort.digest), 1)
        for other in self._holders_in(masked_with, cohort):
            seed = secrets.pair_seed(cohort.keys[other].mask_key, cohort.digest)
            add_mask(vectors, seed, pair_sign(self.site, other))

    def _neighbours(self, cohort: Cohort) -> list[SiteId]:
        return neighbours_of(self.site, cohort.sites, self.options.neighbours, cohort.digest)

    def _holders_in(self, masked_with: Sequence[SiteId], cohort: Cohort) -> list[SiteId]:
        """Return those of these sites with which this one shares masks and secrets."""
        return sorted(set(self._neighbours(cohort)) & set(masked_with))

    def _read_cohort(self, fields: Fields, received: Mapping[str, str] | None) -> Cohort:
        """Return the verified cohort of a message; `received`: hashes that this site must have signed."""
        cohort = Cohort.from_json(str(fields["run"]), int(fields["round"]), read_masks(fields).get("keys"))
        own = cohort.keys.get(self.site)
        if own is None:
            raise Refused("cohort", f"{self.site} is not among the sites of this round")
        if received is not None and dict(own.received) != dict(received):
            raise Refused("cohort", f"the weights sent to {self.site} are not those whose hash it has signed")
        secrets = self._secrets_in(cohort)
        public = secrets.mask_key.public_key().public_bytes_raw(), secrets.cipher_key.public_key().public_bytes_raw()
        if (own.mask_key, own.cipher_key) != public:
            raise Refused("cohort", f"the keys of {self.site} in this round are not its own; ask it for new ones")
        cohort.check(self.options, self.peers, self.least_sites)
        # In two cohorts with the same keys, one could reveal this site's mask key and the other its own mask.
        self.agreements.bind(cohort.round, f"cohort of attempt {own.attempt}", cohort.digest)
        return cohort

    def _read_masked_with(self, fields: Fields, cohort: Cohort) -> list[SiteId]:
        """Return the sites with which updates of this round are masked."""
        sites = read_sites(read_masks(fields).get("sites"), cohort.keys)
        self._check_enough(sites, cohort, "shared their secrets")
        return sites

    def _read_survivors(self, fields: Fields, cohort: Cohort) -> tuple[list[SiteId], list[SiteId]]:
        """Return the sites with which updates were masked and the survivors, after binding this site to both.

        Raises `Refused` unless every survivor has signed that it masked its update with the same sites.
        """
        signed = read_texts(read_masks(fields).get("survivors"))
        masked_with = self._read_masked_with(fields, cohort)
        survivors = read_sites(sorted(signed), dict.fromkeys(masked_with))
        self._check_enough(survivors, cohort, "sent their updates")
        for site in survivors:
            self.peers.verify(site, "masked", cohort.masked_statement(site, masked_with), signed[site])
        self._bind_sites(cohort, masked_with)
        self.agreements.bind(cohort.round, "survivors", f"{cohort.digest} {survivors}")
        return masked_with, survivors

    def _bind_sites(self, cohort: Cohort, masked_with: Sequence[SiteId]) -> None:
        """Bind this site to the sites with which it masks in this attempt, which has masks of its own."""
        self.agreements.bind(cohort.round, f"sites of {cohort.digest}", str(masked_with))

    def _check_enough(self, sites: Sequence[SiteId], cohort: Cohort, what: str) -> None:
        least = max(self.options.threshold_of(len(cohort.keys)), self.least_sites)
        if self.site not in sites or len(sites) < least:
            where = "without" if self.site not in sites else "with"
            raise Refused("cohort", f"{len(sites)} sites {what}, {where} {self.site}, where {least} are needed")

    def _secrets_in(self, cohort: Cohort) -> RoundSecrets:
        own = cohort.keys[self.site]
        return self._secrets({"run": cohort.run, "round": cohort.round}, own.received, own.attempt)

    def _secrets(self, fields: Fields, received: Mapping[str, str], attempt: int) -> RoundSecrets:
        hashes = [text for item in sorted(received.items()) for text in item]
        where = str(fields["run"]), int(fields["round"]), attempt, self.agreements.times_allowed
        return RoundSecrets(derive_key(self.read_key(), "masks", *where, *hashes))


def read_masks(fields: Fields) -> Fields:
    """Return what a message says about masks; raises `Refused` if it says nothing."""
    masks = fields.get(MASKS)
    if not isinstance(masks, dict):
        raise Refused("masks", "the recipe masks updates, and the message has no keys for it")
    return masks
