"""The points of masked rounds at which `test_masks.py` kills."""

OF_SITES = ("keys-made", "secrets-shared", "update-masked", "survivors-recorded", "shares-revealed")
OF_SERVERS = (
    "keys-collected",
    "shares-collected",
    "masked-update-added",
    "updates-collected",
    "survivors-agreed",
    "sum-unmasked",
)
