"""The memory of sites between rounds: in RAM, or in one checksummed file per site and round."""

import hashlib
from pathlib import Path
from typing import TypeAlias

from polyclinic.core import Bundle, FlatTensors, Refused, SiteId, StoreError, Tensors, copy_tensors
from polyclinic.storage import messages
from polyclinic.storage.files import explain_os_errors, make_folder, write_atomically


class RamMemory:
    """Keeps the memory of the last two rounds of each site for as long as the process lives."""

    def __init__(self) -> None:
        self._kept: dict[SiteId, list[tuple[int, Bundle]]] = {}

    def load(self, site: SiteId, before: int) -> Bundle | None:
        """Return the memory of the last round before `before`; None if there is none."""
        return next((m for r, m in reversed(self._kept.get(site, [])) if r < before), None)

    def save(self, site: SiteId, round: int, memory: Bundle, oldest_snapshot: int) -> None:
        earlier = [(r, m) for r, m in self._kept.get(site, []) if r < round]
        own = {kind: _without_shared_storage(group) for kind, group in memory.items()}
        self._kept[site] = [*earlier[-1:], (round, own)]

    def forget(self, site: SiteId, after: int, before: int) -> None:
        """Drop the memory of the rounds between, which did not count."""
        self._kept[site] = [(r, m) for r, m in self._kept.get(site, []) if not after < r < before]

    def save_report(self, site: SiteId, round: int, found: Bundle) -> None:
        """Nothing is kept: there is no folder to read it from."""


def _without_shared_storage(group: Tensors) -> Tensors:
    """Copy tensors that share their storage with others, such as those of all sites of a stack."""
    held = [group.vector] if isinstance(group, FlatTensors) else list(group.values())
    return group if all(t.untyped_storage().nbytes() == t.nbytes for t in held) else copy_tensors(group)


class DiskMemory:
    """One checksummed file per site and round, in the site's own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, site: SiteId, before: int) -> Bundle | None:
        for path in reversed(self._paths(site)):
            if int(path.stem) < before:
                try:
                    return messages.decode(path.read_bytes()).tensors
                except (Refused, OSError) as error:
                    raise StoreError(
                        f"the memory of site {site} in {path} is damaged ({error}); restore the file or start anew"
                    ) from error
        return None

    def save(self, site: SiteId, round: int, memory: Bundle, oldest_snapshot: int) -> None:
        """Save, then drop versions that no resume needs: all at or before `oldest_snapshot` but the newest."""
        folder = self._folder(site)
        make_folder(folder)
        write_atomically(folder / f"{round:06d}.pcl", messages.encode({"round": round}, memory), "memory-half-written")
        with explain_os_errors(folder):
            for old in [path for path in self._paths(site) if int(path.stem) <= oldest_snapshot][:-1]:
                old.unlink(missing_ok=True)

    def forget(self, site: SiteId, after: int, before: int) -> None:
        with explain_os_errors(self._folder(site)):
            for path in self._paths(site):
                if after < int(path.stem) < before:
                    path.unlink(missing_ok=True)

    def save_report(self, site: SiteId, round: int, found: Bundle) -> None:
        """Save figures for the site's own staff; they are never loaded here."""
        folder = self._folder(site) / "scores"
        make_folder(folder)
        write_atomically(folder / f"{round:06d}.safetensors", messages.encode_body(found).data)

    def _folder(self, site: SiteId) -> Path:
        return self.folder / hashlib.sha256(site.encode()).hexdigest()[:16]

    def _paths(self, site: SiteId) -> list[Path]:
        return sorted(self._folder(site).glob("[0-9]*.pcl"))


SiteMemory: TypeAlias = RamMemory | DiskMemory
"""The memory of sites between rounds, by round, so that a round can be repeated."""
