"""How numbers, intervals and lists of names are written, everywhere."""

import math
from collections.abc import Callable, Sequence

MISSING = "–"


def format_number(value: float | None, places: int = 3) -> str:
    """0.662; a dash for None and NaN."""
    return MISSING if value is None or math.isnan(value) else f"{value:,.{places}f}"


def format_signed(value: float | None, places: int = 3) -> str:
    """+0.021; a dash for None and NaN."""
    return MISSING if value is None or math.isnan(value) else f"{value:+,.{places}f}"


def format_compact(value: float) -> str:
    """12 or 1e+06, for axes."""
    return f"{value:g}" if abs(value) < 1e5 else f"{value:.0e}"


def format_digits(value: float) -> str:
    """Three significant digits, for axes."""
    return f"{value:.3g}"


def format_percent(share: float | None, places: int = 0) -> str:
    """66 %, of a share of 0.66."""
    return MISSING if share is None or math.isnan(share) else f"{100 * share:.{places}f} %"


def format_points(difference: float) -> str:
    """A difference of shares in percentage points: +2.1, −0.4."""
    if math.isnan(difference):
        return MISSING
    return "0.0" if abs(difference) < 0.0005 else f"{100 * difference:+.1f}".replace("-", "−")


def format_interval(low: float, high: float, show: Callable[[float], str] = format_number) -> str:
    """0.597 to 0.729; a dash where there is none."""
    return MISSING if math.isnan(low) else f"{show(low)} to {show(high)}"


def format_spread(mean: float, std: float | None, places: int = 3) -> str:
    """0.662 ± 0.010; the mean alone without a standard deviation."""
    return format_number(mean, places) + ("" if std is None or math.isnan(std) else f" ± {std:.{places}f}")


def format_p_value(p: float) -> str:
    return MISSING if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def format_megabytes(amount: float) -> str:
    """150.1, of bytes."""
    return f"{amount / 1e6:,.1f}"


def format_duration(seconds: float, places: int = 1) -> str:
    if seconds < 100:
        return f"{seconds:.{places}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"


def format_count(amount: int, noun: str) -> str:
    """One site, 5 sites."""
    return f"{'none' if amount == 0 else 'one' if amount == 1 else amount} {noun}{'' if amount == 1 else 's'}"


def format_names(names: Sequence[str], most: int | None = None) -> str:
    """ "a, b and c"; with `most`, "a, b and 4 more"."""
    if most is not None and len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names) or "nobody"


def round_up(value: float, digits: int = 3) -> str:
    """Significant digits, rounded up: a privacy cost is never shown smaller than it is."""
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else "∞"
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{math.ceil(value / unit - 1e-9) * unit:.{digits}g}"
