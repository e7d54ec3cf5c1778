"""The report's page in headless Chromium: opened from a file, looked at, clicked, zoomed, dragged.

It needs Debian's chromium and chromium-driver (or any pair of them on PATH) and selenium; without them these
tests are skipped. One browser serves all of them.
"""

import base64
import json
import shutil
import time
from functools import partial

import pytest
from report_runs import event, record, records, status, write_run

from zero_mpi.launch.world import World
from zero_mpi.report import command

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


if not why_not():
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver import ActionChains, Keys
    from selenium.webdriver.support.ui import WebDriverWait

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
    gap = [record(step, loss=None if step in (30, 31) else 2.0 + step % 2) for step in range(1, 61)]
    broken = write_run(folder / "broken", gap, events=[])
    old = write_run(folder / "old", [{"step": step, "loss": 2.0} for step in range(1, 9)], events=[])
    made = {"one": [one], "two": [one, two], "long": [long], "broken": [broken], "old": [old]}
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


DRAWN = (
    """return !document.querySelector(".plot") || document.querySelectorAll(".plot .main-svg").length > 0"""
)


def fetched(browser):
    """What was asked for since the log was last read, but what is inside the page or the browser's own."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {
        one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"
    }
    return {url for url in urls if not url.startswith(("data:", "chrome:"))}


def settle(browser):
    """Wait until what was asked for has been drawn; Plotly, until it has been unpacked."""
    WebDriverWait(browser, 60).until(lambda browser: browser.execute_script(DRAWN))
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def soon(browser, what):
    """Wait for what Plotly does a moment later."""
    WebDriverWait(browser, 20, ignored_exceptions=(StaleElementReferenceException,)).until(lambda _: what())


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


def steps_of(browser):
    """The labels below the curves, from left to right."""
    script = """return [...document.querySelectorAll('#curves-plot .xaxislayer-above .xtick text')]
        .map((one) => [one.getBoundingClientRect().x, one.textContent])
        .sort((a, b) => a[0] - b[0]).map((one) => one[1])"""
    return browser.execute_script(script)


def range_of(browser):
    """What part of the axis is in sight."""
    return browser.execute_script(
        "return document.querySelector('#curves-plot').layout.xaxis.range.map(Number)"
    )


def axis_of(browser, name):
    """What a chart's upright axis is like."""
    return browser.execute_script("return document.querySelector('#curves-plot').layout[arguments[0]]", name)


def curves(browser, group=None):
    """How many curves are drawn, of a run or of all."""
    script = """return document.querySelector('#curves-plot').data
        .filter((one) => one.visible !== 'legendonly' && one.mode.startsWith('lines'))
        .map((one) => one.legendgroup)"""
    return sum(group in (None, found) for found in browser.execute_script(script))


def paths(browser, axis="y2"):
    """How the curves of a chart are drawn, in its own units."""
    script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.getAttribute('d'))"
    return browser.execute_script(script, f"#curves-plot .subplot.x{axis} .scatterlayer path.js-line")


def place_in(browser, axis, share, down=0.5):
    """Bring a chart into sight: (element, x, y) of a place in it, from the middle of the element."""
    area = find(browser, f"#curves-plot .draglayer .x{axis} .nsewdrag")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", area)
    box = browser.execute_script("return arguments[0].getBoundingClientRect().toJSON()", area)
    return area, round((share - 0.5) * box["width"]), round((down - 0.5) * box["height"])


def drag(browser, axis, start, end):
    """Press in a chart at one share of its width, let go at another."""
    area, first, y = place_in(browser, axis, start)
    last = place_in(browser, axis, end)[1]
    actions = ActionChains(browser, duration=20).move_to_element_with_offset(area, first, y).click_and_hold()
    actions.move_to_element_with_offset(area, (first + last) // 2, y)
    actions.move_to_element_with_offset(area, last, y).release().perform()
    settle(browser)


def hover(browser, axis, share, down=0.5):
    """Point into a chart; what is said there, by line."""
    area, x, y = place_in(browser, axis, share, down)
    ActionChains(browser, duration=20).move_to_element_with_offset(area, x, y).perform()
    return said(browser)


def said(browser):
    """The lines of the box at the pointer, once it is there."""
    box = "#curves-plot .hoverlayer .legend text"
    soon(browser, lambda: count(browser, box))
    script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
    return browser.execute_script(script, box)


def is_said(browser, beginning):
    """Whether a line of the box begins so."""
    return any(line.startswith(beginning) for line in said(browser))


def double_click(browser, axis="y2"):
    """Click twice in a chart."""
    ActionChains(browser).double_click(place_in(browser, axis, 0.5)[0]).perform()
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
    across, high = browser.execute_script(
        "const d = document.documentElement; return [d.scrollWidth, d.scrollHeight]"
    )
    assert across == size[0]  # nothing to scroll to the side
    assert high > 2 * size[1]
    wide = [one.size["width"] for one in browser.find_elements("css selector", ".plot .svg-container")]
    assert len(wide) == 2
    assert all(300 < one < size[0] for one in wide)
    browser.execute_script("document.querySelector('.plot').scrollIntoView()")
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


def test_numbers_are_there_without_a_script(show):
    browser = show("one")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.refresh()
        assert find(browser, "#curves noscript").text == "Curves need JavaScript; the numbers are below."
        assert not find(browser, "#theme").is_displayed()
        assert not find(browser, ".controls").is_displayed()
        assert find(browser, "#values").is_displayed()
        assert find(browser, "#only-differs").is_displayed()
        assert len(browser.find_elements("css selector", "#values tbody tr")) == 9
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_printed_page_has_its_curves_and_fits_the_paper(show):
    browser = show("two", dark=True)
    ink = "return document.querySelector('#curves-plot').layout.font.color"
    before = browser.execute_script(ink)
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    settle(browser)
    assert browser.execute_script(ink) == "#000"
    assert find(browser, "#curves-plot .main-svg").size["width"] == 690
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    soon(browser, lambda: find(browser, "#curves-plot .main-svg").size["width"] > 1000)
    assert browser.execute_script(ink) == before
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert pdf.startswith(b"%PDF")


COLOURS_OF = """return document.querySelector('#curves-plot').data.filter((one) => one.mode !== 'none')
    .map((one) => [one.yaxis || 'y', one.name, one.marker.color])"""


OF_RUNS = """const sample = document.querySelector('#colour');
    const colour = (run) => { sample.className = `c${run}`; return getComputedStyle(sample).color; };
    return [0, 1, 2, 3, 4, 5, 6, 7].map(colour);"""


STROKES = "return [...document.querySelectorAll(arguments[0])].map((one) => one.style.stroke)"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["one", "two"])
def test_validation_and_marks_have_colours_that_no_training_curve_has(show, name, dark):
    browser = show(name, dark=dark)
    runs = set(browser.execute_script(OF_RUNS))
    assert len(runs) == 8
    given = {(axis, title): colour for axis, title, colour in browser.execute_script(COLOURS_OF)}
    first = "one " if name == "two" else ""
    training, validation = given["y2", f"{first}training"], given["y2", f"{first}validation"]
    assert training in runs
    assert validation != training
    assert (validation in runs) == (name == "one"), "of several runs it is a tone of its run's colour"
    for kind in ("resumed", "warning", "failed or lost"):
        assert given["y", kind] not in runs
    strokes = browser.execute_script(STROKES, "#curves-plot .subplot.xy2 .js-line")
    assert {training, validation} <= set(strokes)
    lines = browser.execute_script(STROKES, "#curves-plot .shapelayer path")
    assert len(lines) == 3 if name == "one" else len(lines) >= 3
    assert not runs & set(lines)


@pytest.mark.parametrize("dark", [False, True])
def test_a_table_that_goes_on_has_a_shadow_where_it_does(show, dark):
    browser = show("two", PHONE, dark=dark)

    def edges(place):
        """Pictures of the left and the right edge, the table scrolled to `place`, once it is painted."""
        browser.execute_script(
            "const box = document.querySelector('#values .scroll'); box.scrollIntoView();"
            "box.scrollLeft = arguments[0] === 'end' ? 9999 : 0",
            place,
        )
        settle(browser)
        box = find(browser, "#values .scroll").rect
        about = {"y": box["y"] + 70, "width": 8, "height": 8, "scale": 1}
        clips = [{**about, "x": x} for x in (box["x"] + 3, box["x"] + box["width"] - 11)]
        requests = [{"format": "png", "captureBeyondViewport": True, "clip": clip} for clip in clips]
        return [browser.execute_cdp_cmd("Page.captureScreenshot", request)["data"] for request in requests]

    soon(browser, lambda: all(map(str.__ne__, edges("start"), edges("end"))))


def test_hostile_sample_does_nothing(show):
    browser = show("two")
    assert HOSTILE in texts(browser, ".sample pre")
    assert browser.execute_script("return window.harmed") is None


# ------------------------------------------------------------------------------------------- clicked


def test_legend_switches_a_run_off_and_on(show):
    def toggle(name):
        click_text = "return [...document.querySelectorAll('#curves-plot .legend .traces')].find("
        click_text += "(one) => one.textContent.trim() === arguments[0]).querySelector('.legendtoggle')"
        ActionChains(browser).click(browser.execute_script(click_text, name)).perform()
        time.sleep(0.7)  # Plotly waits whether it becomes a double click
        settle(browser)

    browser = show("two")
    assert (curves(browser, "run 0"), curves(browser, "run 1")) == (9, 9)
    lines = count(browser, "#curves-plot .shapelayer path")
    toggle("two training")
    assert (curves(browser, "run 0"), curves(browser, "run 1")) == (9, 0)
    assert not any("two" in line for line in hover(browser, "y2", 0.5))
    toggle("one training")
    assert curves(browser) == 0
    assert count(browser, "#curves-plot .shapelayer path") < lines
    toggle("two training")
    assert curves(browser, "run 1") == 9
    assert 44 < range_of(browser)[1] < 50, "the axis is that of the shorter run"


@pytest.mark.parametrize("back", ["double click", "button"])
def test_drag_zooms_all_charts_and_can_be_reset(show, back):
    browser = show("one")
    whole = steps_of(browser)
    assert whole[-1] == "60"
    upright = [axis_of(browser, f"yaxis{number}")["range"] for number in (2, 4)]
    drag(browser, "y3", 0.3, 0.6)
    low, high = range_of(browser)
    assert 10 <= low < high <= 40
    assert all(10 <= int(step) <= 40 for step in steps_of(browser))
    assert [axis_of(browser, f"yaxis{number}")["range"] for number in (2, 4)] == upright
    if back == "button":
        click(browser, "#reset")
    else:
        for _ in range(5):  # on a busy machine the second click may come too late to make it a double one
            double_click(browser)
            if steps_of(browser) == whole:
                break
    assert steps_of(browser) == whole


def test_fingers_pinch(show):
    browser = show("one", PHONE)
    before = range_of(browser)
    area, _, _ = place_in(browser, "y2", 0.5)
    box = browser.execute_script("return arguments[0].getBoundingClientRect().toJSON()", area)
    y, middle = box["y"] + 60, box["x"] + box["width"] / 2

    def touch(kind, *places):
        points = [{"x": x, "y": y, "id": finger} for finger, x in enumerate(places)]
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", middle - 20, middle + 20)
    for spread in (30, 50, 80):
        touch("touchMove", middle - spread, middle + spread)
    touch("touchEnd")
    settle(browser)
    low, high = range_of(browser)
    assert before[0] + 10 < low < high < before[1] - 10


def test_pointing_reads_all_charts_at_one_step(show):
    browser = show("one")
    head, *lines = hover(browser, "y2", 0.5)
    step = int(head.removeprefix("step "))
    assert 20 < step < 40
    shown = dict(line.split(" : ") for line in lines if " : " in line)
    assert float(shown["training"]) == pytest.approx(record(step)["loss"], rel=1e-3)
    assert float(shown["gradient norm"]) == pytest.approx(record(step)["grad_norm"], rel=1e-3)
    assert shown["share of peak"] == "40 %"
    assert shown["bytes a step"] == "1 MiB"
    assert {"learning rate", "tokens/s", "waiting"} <= set(shown)
    assert count(browser, "#curves-plot .hoverlayer .spikeline") >= 1


def test_pointing_at_a_mark_tells_what_happened(show):
    browser = show("one")
    for step, wanted in (
        (33, "step 33: lost: a job of 2 rank(s)"),
        (20, "step 20: resumed from step-00000020"),
        (20, "step 20: warning: NumPy changed"),
    ):
        low, high = range_of(browser)
        hover(browser, "y", (step - low) / (high - low))
        soon(browser, partial(is_said, browser, wanted))  # the box of the place before may stay a moment


def test_axis_logarithm_and_smoothing_redraw(show):
    browser = show("one")
    seen = [paths(browser)]
    click(browser, "label:has([value=tokens])")
    assert steps_of(browser)[-1] == "120k"
    click(browser, "label:has([value=seconds])")
    assert axis_of(browser, "xaxis")["title"]["text"] == "time, seconds"
    assert range_of(browser)[1] == pytest.approx(15, abs=1)
    click(browser, "label:has([value=step])")
    assert paths(browser) == seen[0]
    click(browser, "label:has([value=yaxis2])")
    assert axis_of(browser, "yaxis2")["type"] == "log"
    seen.append(paths(browser))
    click(browser, "label:has([value=yaxis2])")
    assert paths(browser) == seen[0]
    browser.execute_script(
        "const one = document.querySelector('#smooth'); one.value = 80;"
        "one.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    settle(browser)
    seen.append(paths(browser))
    assert len(seen[-1]) == len(seen[0]) + 1, "the smoothed curve lies over its own"
    assert len({tuple(each) for each in seen}) == 3


def test_an_axis_that_no_run_has_cannot_be_chosen(show):
    browser = show("old")
    enabled = [find(browser, f"[value={axis}]").is_enabled() for axis in ("step", "seconds", "tokens")]
    assert enabled == [True, False, False]


def test_keys_move_and_zoom(show):
    browser = show("one")
    whole = range_of(browser)
    plot = find(browser, "#curves-plot")
    plot.send_keys(Keys.ARROW_RIGHT)
    first = said(browser)[0]
    plot.send_keys(Keys.ARROW_RIGHT * 5)
    soon(browser, lambda: int(said(browser)[0].removeprefix("step ")) > int(first.removeprefix("step ")))
    plot.send_keys("++")
    settle(browser)
    low, high = range_of(browser)
    assert high - low == pytest.approx((whole[1] - whole[0]) / 4)
    plot.send_keys("-")
    settle(browser)
    assert range_of(browser)[1] - range_of(browser)[0] == pytest.approx((whole[1] - whole[0]) / 2)
    plot.send_keys(Keys.ESCAPE)
    settle(browser)
    assert range_of(browser) == whole


def test_settings_can_be_reduced_to_what_differs(show):
    browser = show("two")
    before = sum(row.is_displayed() for row in browser.find_elements("css selector", "#settings tbody tr"))
    click(browser, "#only-differs")
    after = sum(row.is_displayed() for row in browser.find_elements("css selector", "#settings tbody tr"))
    assert (before, after) == (2, 0)  # both runs have the same settings


def test_long_runs_have_bands(show):
    browser = show("long")
    assert count(browser, "#curves-plot .subplot.xy2 .js-fill") == 1
    drag(browser, "y2", 0.5, 0.6)
    assert count(browser, "#curves-plot .subplot.xy2 .js-fill") == 1
    low, high = range_of(browser)
    assert 3000 <= low < high <= 8000
    assert any("(2 to 8)" in line for line in hover(browser, "y2", 0.5))


def test_a_value_that_is_not_finite_is_a_gap_with_a_cross(show):
    browser = show("broken")
    assert len(paths(browser)) == 2
    crosses = "#curves-plot .subplot.xy2 .scatterlayer .points path"
    assert count(browser, crosses) == 2
