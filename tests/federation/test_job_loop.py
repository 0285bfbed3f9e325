"""The loop over the jobs of a generator."""

from collections.abc import Generator

from polyclinic.federation.job_loop import JobLoop


def add_results(jobs: int) -> Generator[int, int, int]:
    total = 0
    for job in range(jobs):
        total += yield job
    return total


def test_results_reach_the_generator_and_its_return_value_is_kept() -> None:
    jobs, seen = JobLoop(add_results(3)), []
    for job in jobs:
        seen.append(job)
        jobs.result = 10**job
    assert (seen, jobs.returned) == ([0, 1, 2], 111)


def test_a_generator_without_jobs_returns_at_once() -> None:
    jobs = JobLoop(add_results(0))
    assert list(jobs) == []
    assert jobs.returned == 0
