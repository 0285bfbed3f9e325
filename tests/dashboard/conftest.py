"""The board's tests follow the runs and comparisons that reports are made of."""

from tests.reporting.conftest import browser as browser
from tests.reporting.conftest import compared as compared
from tests.reporting.conftest import seeds as seeds
from tests.reporting.conftest import single as single
