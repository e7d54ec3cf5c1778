"""The report's page in headless Chromium: opened from a file, looked at, clicked, zoomed, dragged.

It needs Debian's chromium and chromium-driver (or any pair of them on PATH) and selenium; without them these
tests are skipped. One browser serves all of them.
"""

import base64
import json
import shutil

import pytest
from report_runs import event, record, records, status, write_run

from zero_mpi.launch.world import World
from zero_mpi.report import command
from zero_mpi.report.format import FORMS, labels, ticks
from zero_mpi.report.page import HERE

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = (1280, 900), (360, 740)
HOSTILE = "<img src=x onerror='window.harmed=1'><script>window.harmed=1</script>"


def why_not():
    """Why there is no browser to test with, or an empty text."""
    if not any(map(shutil.which, BROWSERS)) or not shutil.which("chromedriver"):
        return "no chromium with its chromedriver: apt-get install chromium chromium-driver"
    try:
        import selenium  # noqa: F401
    except ImportError as error:
        return f"no selenium: {error}"
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "a browser is there")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a window and without a sandbox, which containers and root do not allow."""
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
    ):
        options.add_argument(f"--{flag}")
    for flag in (
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


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of one run, of two and of a long one."""
    folder = tmp_path_factory.mktemp("pages")
    one = write_run(folder / "one", status=status())
    two = write_run(
        folder / "two", list(records(45)), events=[event("sample", 9, prompt=HOSTILE, text=HOSTILE)]
    )
    long = write_run(folder / "long", [record(step, loss=2 + step % 7) for step in range(1, 9001)], events=[])
    made = {"one": [one], "two": [one, two], "long": [long]}
    for name, runs in made.items():
        assert command.command(World(0, 1), [*map(str, runs), "--out", str(folder / f"{name}.html")]) == 0
    return {name: (folder / f"{name}.html").as_uri() for name in made}


@pytest.fixture
def show(browser, pages):
    """Open a page in a window of a size, light or dark; at the end nothing may be on the console."""
    opened = []

    def show(name, size=DESKTOP, *, dark=False):
        browser.get_log("performance")
        screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        browser.get(pages[name])
        opened.append(name)
        settle(browser)
        return browser

    yield show
    assert opened
    assert browser.get_log("browser") == []
    assert fetched(browser) - set(pages.values()) == set()


def fetched(browser):
    """What was asked for since the log was last read, but what is inside the page or the browser's own."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {
        one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"
    }
    return {url for url in urls if not url.startswith(("data:", "chrome:"))}


def settle(browser):
    """Wait until what was asked for has been drawn."""
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def find(browser, selector):
    """The first element."""
    return browser.find_element("css selector", selector)


def click(browser, selector):
    """Click it, by its own handler: what is out of sight is scrolled to."""
    element = find(browser, selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()
    settle(browser)


def count(browser, selector):
    """How many there are."""
    return len(browser.find_elements("css selector", selector))


def texts(browser, selector):
    """What they say."""
    script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)"
    return browser.execute_script(script, selector)


def steps_of(browser, chart="loss"):
    """The labels below a chart."""
    script = """return [...document.querySelectorAll(`[data-chart=${arguments[0]}] text.tick`)]
        .filter((one) => one.getAttribute("text-anchor") === "middle").map((one) => one.textContent)"""
    return browser.execute_script(script, chart)


def drag(browser, chart, start, end):
    """Press in a chart at one share of its width, let go at another."""
    from selenium.webdriver import ActionChains

    canvas = find(browser, f"[data-chart={chart}] .canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    width = canvas.size["width"]
    places = [round((share - 0.5) * width) for share in (start, end)]
    actions = (
        ActionChains(browser, duration=10).move_to_element_with_offset(canvas, places[0], 20).click_and_hold()
    )
    actions.move_to_element_with_offset(canvas, places[1], 25).release().perform()
    settle(browser)


def point_at(browser, selector):
    """Point at an element."""
    from selenium.webdriver import ActionChains

    element = find(browser, selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    ActionChains(browser, duration=10).move_to_element(element).perform()
    settle(browser)


def hover(browser, chart, share):
    """Point at a chart."""
    from selenium.webdriver import ActionChains

    canvas = find(browser, f"[data-chart={chart}] .canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    place = round((share - 0.5) * canvas.size["width"])
    ActionChains(browser, duration=10).move_to_element_with_offset(canvas, place, 10).perform()
    settle(browser)


COLOURS = """const [image, done] = arguments, shown = new Image();
shown.onload = () => {
  const canvas = new OffscreenCanvas(shown.width, shown.height), context = canvas.getContext("2d");
  context.drawImage(shown, 0, 0);
  const pixels = new Uint32Array(context.getImageData(0, 0, shown.width, shown.height).data.buffer);
  const found = new Map();
  for (const pixel of pixels) found.set(pixel, (found.get(pixel) || 0) + 1);
  done([...found.values()].sort((a, b) => b - a).map((number) => number / pixels.length));
};
shown.src = "data:image/png;base64," + image;"""


def shares_of_colours(browser, picture):
    """What part of a PNG each of its colours covers, the largest first; counted by the browser itself."""
    browser.get("about:blank")
    return browser.execute_async_script(COLOURS, base64.b64encode(picture).decode())


# ---------------------------------------------------------------------------------------------- seen


@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), (DESKTOP, True), (PHONE, False), (PHONE, True)])
def test_picture_is_not_blank_and_fits(show, size, dark):
    browser = show("two", size, dark=dark)
    wide, high = browser.execute_script(
        "const d = document.documentElement; return [d.scrollWidth, d.scrollHeight]"
    )
    assert wide == size[0]  # nothing to scroll to the side
    assert high > 2 * size[1]
    assert all(one.size["width"] > 200 for one in browser.find_elements("css selector", ".canvas"))
    find(browser, "[data-chart=loss]")
    browser.execute_script("document.querySelector('[data-chart=loss]').scrollIntoView()")
    shares = shares_of_colours(browser, browser.get_screenshot_as_png())
    assert len(shares) > 100  # letters and lines with soft edges
    assert shares[0] < 0.95


def test_dark_mode_follows_the_system_and_the_switch(show):
    ground = "return getComputedStyle(document.body).backgroundColor"
    browser = show("one")
    light = browser.execute_script(ground)
    click(browser, "#theme")
    dark = browser.execute_script(ground)
    assert (light, dark) == ("rgb(245, 246, 248)", "rgb(13, 16, 20)")
    browser = show("one", dark=True)
    assert browser.execute_script(ground) == dark
    click(browser, "#theme")
    assert browser.execute_script(ground) == light
    click(browser, "#theme")
    assert browser.execute_script(ground) == dark


def test_curves_are_there_without_a_script(show):
    browser = show("one")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.refresh()
        assert count(browser, ".curve .line") == 9
        assert find(browser, "[data-chart=loss] svg.plot").size["height"] > 200
        assert not find(browser, "#theme").is_displayed()
        assert find(browser, "#values").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


STYLE_OF = """const style = getComputedStyle(document.querySelector(arguments[0]));
return style[arguments[1]];"""


def style_of(browser, selector, name):
    """What the first element looks like."""
    return browser.execute_script(STYLE_OF, selector, name)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["one", "two"])
def test_validation_and_marks_have_colours_that_no_training_curve_has(show, name, dark):
    browser = show(name, dark=dark)
    runs = {
        browser.execute_script(
            "const one = document.createElement('i'); one.className = arguments[0];"
            "document.body.append(one); one.style.color = 'var(--c)'; return getComputedStyle(one).color",
            f"c{number}",
        )
        for number in range(8)
    }
    assert len(runs) == 8
    training = style_of(browser, "[data-chart=loss] .main .line", "stroke")
    assert training in runs
    validation = style_of(browser, "[data-chart=loss] .val .line", "stroke")
    assert validation != training
    assert (validation in runs) == (name == "one"), "of several runs it is a tone of its run's colour"
    assert style_of(browser, "[data-chart=loss] .key.val", "borderTopColor") == validation
    assert style_of(browser, ".mark.resumed .glyph", "fill") not in runs
    assert style_of(browser, ".mark.resumed .stem", "stroke") not in runs


@pytest.mark.parametrize("dark", [False, True])
def test_a_table_that_goes_on_has_a_shadow_where_it_does(show, dark):
    browser = show("two", PHONE, dark=dark)
    edges = {}
    for place in ("start", "end"):
        browser.execute_script(
            "const box = document.querySelector('#values .scroll'); box.scrollIntoView();"
            "box.scrollLeft = arguments[0] === 'end' ? 9999 : 0",
            place,
        )
        box = find(browser, "#values .scroll").rect
        about = {"y": box["y"] + 70, "width": 8, "height": 8, "scale": 1}
        for side, x in (("left", box["x"] + 3), ("right", box["x"] + box["width"] - 11)):
            request = {"format": "png", "captureBeyondViewport": True, "clip": {**about, "x": x}}
            edges[place, side] = browser.execute_cdp_cmd("Page.captureScreenshot", request)["data"]
    assert edges["start", "right"] != edges["end", "right"]
    assert edges["start", "left"] != edges["end", "left"]


def test_hostile_sample_does_nothing(show):
    browser = show("two")
    assert HOSTILE in texts(browser, ".sample pre")
    assert browser.execute_script("return window.harmed") is None


# ------------------------------------------------------------------------------------------- clicked


def test_legend_switches_a_run_off_and_on(show):
    browser = show("two")
    assert (count(browser, ".curve.c0"), count(browser, ".curve.c1")) == (9, 9)
    click(browser, ".chip[data-run='1']")
    assert (count(browser, ".curve.c0"), count(browser, ".curve.c1")) == (9, 0)
    assert find(browser, ".chip[data-run='1']").get_attribute("aria-pressed") == "false"
    assert "two training" not in " ".join(texts(browser, ".readout"))
    click(browser, ".chip[data-run='0']")
    assert count(browser, ".curve") == 0
    click(browser, ".chip[data-run='1']")
    assert count(browser, ".curve.c1") == 9
    assert steps_of(browser)[-1] == "45"  # the axis is that of the shorter run


def test_drag_zooms_all_charts_and_double_click_resets(show):
    from selenium.webdriver import ActionChains

    browser = show("one")
    whole = steps_of(browser)
    assert whole[-1] == "60"
    drag(browser, "lr", 0.3, 0.6)
    for chart in ("loss", "lr", "waits"):
        inside = [int(step) for step in steps_of(browser, chart)]
        assert min(inside) >= 10
        assert max(inside) <= 40
    assert find(browser, "#reset").is_displayed()
    ActionChains(browser).double_click(find(browser, "[data-chart=loss] .canvas")).perform()
    settle(browser)
    assert steps_of(browser) == whole
    assert not find(browser, "#reset").is_displayed()


def test_fingers_pinch(show):
    browser = show("one", PHONE)
    whole = steps_of(browser)
    canvas = find(browser, "[data-chart=loss] .canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    box = browser.execute_script("return arguments[0].getBoundingClientRect().toJSON()", canvas)
    y, middle = box["y"] + 60, box["x"] + box["width"] / 2

    def touch(kind, *places):
        points = [{"x": x, "y": y, "id": finger} for finger, x in enumerate(places)]
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", middle - 20, middle + 20)
    for spread in (30, 50, 80):
        touch("touchMove", middle - spread, middle + spread)
    touch("touchEnd")
    settle(browser)
    near = [int(step) for step in steps_of(browser)]
    assert steps_of(browser) != whole
    assert 10 < min(near) < max(near) < 50


def test_pointing_reads_all_charts_at_one_step(show):
    browser = show("one")
    last = texts(browser, ".readout b")
    hover(browser, "loss", 0.5)
    (tip,) = [said for said in texts(browser, ".tip") if said]
    step = int(tip.splitlines()[0].removeprefix("step "))
    assert 20 < step < 40
    assert count(browser, ".hair") == 8
    numbers = texts(browser, ".readout b")
    assert numbers != last
    shown = dict(zip(("loss", "val_loss", "lr", "grad_norm"), numbers, strict=False))
    assert shown["loss"] == FORMS["plain"](record(step)["loss"])
    assert shown["grad_norm"] == FORMS["plain"](record(step)["grad_norm"])
    point_at(browser, "[data-chart=loss] .mark.fault .glyph")
    (tip,) = [said for said in texts(browser, ".tip") if said]
    assert tip.splitlines() == ["step 33", "lost: a job of 2 rank(s) was killed"]


def test_axis_logarithm_and_smoothing_redraw(show):
    path = (
        "return document.querySelector('[data-chart=loss] .curve.main .line:last-of-type').getAttribute('d')"
    )
    browser = show("one")
    seen = [browser.execute_script(path)]
    click(browser, "[data-axis=tokens]")
    assert steps_of(browser)[-1] == "120k"
    click(browser, "[data-axis=seconds]")
    assert steps_of(browser)[0].endswith("s")
    click(browser, "[data-axis=step]")
    assert browser.execute_script(path) == seen[0]
    click(browser, "[data-chart=loss] [data-log]")
    seen.append(browser.execute_script(path))
    click(browser, "[data-chart=loss] [data-log]")
    browser.execute_script(
        "const one = document.querySelector('#smooth'); one.value = 80; one.dispatchEvent(new Event('input'))"
    )
    settle(browser)
    seen.append(browser.execute_script(path))
    assert count(browser, "[data-chart=loss] .line.raw") == 1
    assert len(set(seen)) == 3


def test_keys_move_and_zoom(show):
    from selenium.webdriver import Keys

    browser = show("one")
    whole = steps_of(browser)
    canvas = find(browser, "[data-chart=lr] .canvas")
    canvas.send_keys(Keys.ARROW_RIGHT)
    settle(browser)
    assert count(browser, ".hair") == 8
    canvas.send_keys("++")
    settle(browser)
    assert steps_of(browser) != whole
    canvas.send_keys(Keys.ESCAPE)
    settle(browser)
    assert steps_of(browser) == whole


def test_settings_can_be_reduced_to_what_differs(show):
    browser = show("two")
    before = sum(
        row.is_displayed() for row in browser.find_elements("css selector", "#settings-table tbody tr")
    )
    click(browser, "#only-differs")
    after = sum(
        row.is_displayed() for row in browser.find_elements("css selector", "#settings-table tbody tr")
    )
    assert (before, after) == (2, 0)  # both runs have the same settings


def test_long_runs_have_bands(show):
    browser = show("long")
    assert count(browser, "[data-chart=loss] .band") == 1
    drag(browser, "loss", 0.5, 0.52)
    assert count(browser, "[data-chart=loss] .band") == 1
    assert all(
        8000 >= float(step.removesuffix("k")) * 1000 >= 3000 for step in steps_of(browser) if "k" in step
    )


# ------------------------------------------------------------------------------- the same in both tongues


VALUES = """0 1 0.5 12.34567 99.996 123.456 440 999.9 1234.4 9999.4 12345 5e5 1234567 1e-3 1.5e-4 4.2e-5 3e-9
1.5e7 2.5e9 59.4 61 3599 3600 86399 90061 1024 1536 3e15"""


def test_script_and_page_write_numbers_alike(browser):
    values = [*map(float, VALUES.split()), 1 / 3]
    spans = [(0.0, 1.0), (1.0, 440.0), (0.0, 0.0042), (-2.0, 9.0), (0.0, 3e9), (1.2e6, 1.3e6), (5.0, 5.0)]
    browser.get("about:blank")
    script = (HERE / "numbers.js").read_text() + (
        "const [values, spans] = arguments;"
        "return [Object.keys(FORMS).map((form) => [form, values.map(FORMS[form])]),"
        "['plain', 'bytes', 'count'].map((form) => spans.map(([low, high]) => {"
        "const places = ticks(low, high, 5, form); return [places, labels(places, form)]; }))];"
    )
    forms, marks = browser.execute_script(script, values, spans)
    for form, found in forms:
        usual = [place for place, value in enumerate(values) if value >= 1e-3 or form == "plain"]
        assert [found[place] for place in usual] == [FORMS[form](values[place]) for place in usual]
    for form, found in zip(("plain", "bytes", "count"), marks, strict=True):
        for (low, high), (places, said) in zip(spans, found, strict=True):
            assert places == pytest.approx(ticks(low, high, 5, form))
            assert said == labels(ticks(low, high, 5, form), form)
