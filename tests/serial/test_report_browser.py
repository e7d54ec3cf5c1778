"""The report's page in headless Chromium: its script runs, the curves are drawn, and nothing is loaded.

The tests need Debian's chromium and chromium-driver (or any pair on PATH) and selenium, otherwise they
are skipped. All tests share one browser.
"""

import json
import shutil

import pytest
from report_runs import event, records, status, write_run

from zero_mpi.commands.report import command
from zero_mpi.launch.world import World

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (1280, 360)  # pixels, of a desktop screen and of a phone
HOSTILE = "<img src=x onerror='window.harmed=1'><script>window.harmed=1</script>"


def why_not():
    """Return the reason why there is no browser to test with, or an empty text."""
    if not any(map(shutil.which, BROWSERS)) or not shutil.which("chromedriver"):
        return "no chromium with its chromedriver: apt-get install chromium chromium-driver"
    try:
        import selenium  # noqa: F401
    except ImportError as error:
        return f"no selenium: {error}"
    return ""


if not why_not():
    from selenium.webdriver.support.ui import WebDriverWait

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "a browser is there")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium without its sandbox, which containers and root do not allow."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        f"user-data-dir={profile}",
        "hide-scrollbars",
        "disable-background-networking",
        "disable-component-update",
        "disable-extensions",
        "no-first-run",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


DRAWN = "return document.querySelectorAll('#curves .main-svg').length > 0"


@pytest.fixture
def show(browser, tmp_path):
    """Open the page of some runs; check afterwards that the console is empty and nothing was loaded."""
    opened = []

    def show(*runs, width=WIDTHS[0], dark=False):
        place = tmp_path / "page.html"
        assert command.command(World(0, 1), [*map(str, runs), "--out", str(place)]) == 0
        browser.get_log("performance")
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        browser.get(place.as_uri())
        WebDriverWait(browser, 60).until(lambda browser: browser.execute_script(DRAWN))
        opened.append(place.as_uri())
        return browser

    yield show
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {
        one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"
    }
    assert {url for url in urls if not url.startswith(("data:", "chrome:", "blob:"))} <= set(opened)


def drawn(browser):
    names = "document.getElementById('curves').data.filter((one) => one.name).map((one) => one.name)"
    return browser.execute_script(f"return {names}")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True])
def test_the_curves_are_drawn_and_the_page_fits(show, tmp_path, width, dark):
    browser = show(write_run(tmp_path / "one", status=status()), width=width, dark=dark)
    assert "one: training" in drawn(browser)
    assert browser.execute_script("return document.querySelectorAll('#curves path.js-line').length") >= 7
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_two_runs_and_a_hostile_one(show, tmp_path):
    events = [event("sample", 9, prompt=HOSTILE, text=HOSTILE), event("warning", 9, text=HOSTILE)]
    hostile = write_run(tmp_path / "<img src=x onerror='window.harmed=1'>", list(records(45)), events=events)
    browser = show(write_run(tmp_path / "one"), hostile)
    assert len(drawn(browser)) == 18
    assert browser.execute_script("return window.harmed") is None
