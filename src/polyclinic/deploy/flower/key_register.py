"""Changes the sites' registered keys while the server runs: at the gateway, and in Flower behind it."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from polyclinic.core import SiteId
from polyclinic.deploy.flower.server import SuperLink
from polyclinic.deploy.provisioning.certificates import PublicKey, read_public_key


class KeyRegister:
    """The keys with which sites may connect to a SuperLink. A run that is being played goes on whatever changes."""

    def __init__(self, link: SuperLink) -> None:
        self.link = link

    def revoke_keys(self, revoked: Iterable[tuple[PublicKey, str]]) -> list[str]:
        """Cut off whoever uses one of these keys, at once; returns a sentence for each site that lost its key."""
        gate, former = self.link.gate, {public_key_to_bytes(key): whose for key, whose in revoked}
        gate.former = {**gate.former, **former}
        gone = [key for key in gate.keys if key in former]
        self._remove_keys(gone)
        return [f"{former[key]} opens no connection any more" for key in gone]

    def register_keys(self, keys: Mapping[SiteId, Path]) -> list[str]:
        """Take these files as the sites' keys, and no others; returns a sentence for each site that this changes."""
        gate = self.link.gate
        wanted = {public_key_to_bytes(read_public_key(path)): site for site, path in keys.items()}
        wanted = {key: site for key, site in wanted.items() if key not in gate.former}
        gone = {key: site for key, site in gate.keys.items() if key not in wanted}
        self._remove_keys(gone)
        told = [f"{site} is no longer registered" for site in gone.values() if site not in wanted.values()]
        for key, site in wanted.items():
            if key not in gate.keys:
                told.append(f"{site} has a new key" if site in self.link.nodes else f"{site} may join the next run")
                self._add_key(key, site)
        return told

    def _remove_keys(self, keys: Iterable[bytes]) -> None:
        """Remove keys at the gateway and in Flower, and end the connections of their owners."""
        link, gone = self.link, {key: self.link.gate.keys[key] for key in keys}
        link.gate.keys = {key: site for key, site in link.gate.keys.items() if key not in gone}
        with link.state.lock:
            for key in gone:
                link.state.node_public_key_to_node_id.pop(key, None)
        for site in gone.values():
            link.state.deactivate_node(link.nodes[site])
            link.gate.notify_site(site)  # ends a request that is held open, and Flower then refuses it

    def _add_key(self, key: bytes, site: SiteId) -> None:
        """Register a key. A site that had another one keeps its node, and so its place in a run."""
        link = self.link
        if site not in link.nodes:
            link.nodes[site] = link.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0, name=site)
        with link.state.lock:
            link.state.nodes[link.nodes[site]].public_key = key
            link.state.node_public_key_to_node_id[key] = link.nodes[site]
        link.gate.keys = {**link.gate.keys, key: site}
