"""The board's tests follow the runs and comparisons that reports are made of."""

from tests.reporting.conftest import browser as browser, compared as compared, seeds as seeds, single as single
