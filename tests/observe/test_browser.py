"""The page in a real browser, opened from disk."""

from __future__ import annotations

import threading
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import pytest
from selenium.webdriver.common.keys import Keys

from retrograd.observe import Observer
from retrograd.observe.server import ViewServer
from retrograd_hookspecs import Message, Score, ToolCall

from .conftest import Browser
from .examples import FACTS, decode, group, read, record_sums, rollout, sum_group, sum_metrics, until

GROUPS = ".groups .row"
MEMBERS = ".members .row"


def address(directory: Path, **state: str) -> str:
    return f"{(directory / 'index.html').as_uri()}#{urlencode(state)}"


def state(browser: Browser) -> dict[str, str]:
    """What the address says."""
    return {name: values[0] for name, values in parse_qs(browser.script("location.hash.slice(1)")).items()}


def count(browser: Browser) -> str:
    return browser.text(".count")


@pytest.fixture
def rollouts(browser: Browser, sums: Path) -> Browser:
    """The rollouts of the example run."""
    browser.open(address(sums, view="rollouts"))
    browser.one(GROUPS)
    return browser


def test_curves(browser: Browser, sums: Path) -> None:
    browser.open(address(sums))
    browser.one(".chart")
    titles = browser.texts(".chart h3")
    assert titles[:2] == ["reward/mean", "eval/reward_mean"]
    assert "policy/kl" in titles
    assert "reward/std" not in titles  # it is the band of the mean
    assert browser.text(".status").startswith("update 12 ·")
    browser.click(".choices button:nth-child(2)")
    browser.wait(lambda: "optimizer/lr" in browser.texts(".chart h3"))
    browser.one(".curves input[type=search]").send_keys("kl")
    browser.wait(lambda: browser.texts(".chart h3") == ["policy/kl"])
    before = browser.script("document.querySelector('.plot .line').getAttribute('d')")
    browser.click(".log")
    browser.wait(lambda: browser.script("document.querySelector('.plot .line').getAttribute('d')") != before)


def test_a_deviation_is_a_band_and_a_value_that_is_no_number_is_marked(
    browser: Browser, tmp_path: Path
) -> None:
    observer = Observer(tmp_path, FACTS, decode=decode, message=pytest.fail)
    observer.run(settings={})
    for update, loss in enumerate((1.0, float("nan"), 0.5, float("inf")), 1):
        observer.update(update, [], {"train/loss": loss})
        observer.evaluation(update, {"eval/reward": 0.5, "eval/reward_std": 0.25})
        until(lambda: not observer._jobs)
    observer.close()
    browser.open(address(tmp_path))
    browser.wait(lambda: browser.texts(".chart h3") == ["eval/reward", "train/loss"])
    assert browser.texts(".readout") == ["0.5 ± 0.25", "inf"]
    assert browser.script("document.querySelectorAll('.chart:nth-child(1) .band').length") == 1
    assert browser.script("document.querySelectorAll('.chart:nth-child(2) .nonfinite').length") == 2


def test_held_out_groups_are_a_list_of_their_own(browser: Browser, tmp_path: Path) -> None:
    """Also, two groups of an update may have one name."""
    observer = Observer(tmp_path, FACTS, decode=decode, message=pytest.fail)
    observer.run(settings={})
    same = [group("same", [rollout("a", ["first"])]), group("same", [rollout("a", ["second"])])]
    observer.update(1, same, {})
    observer.evaluation(1, {}, [group("e", [rollout("a", ["held out"])])])
    observer.close()
    browser.open(address(tmp_path, view="rollouts"))
    browser.wait(lambda: count(browser) == "2 groups")
    browser.press("j")
    browser.wait(lambda: "first" in browser.texts(".message.assistant .text"))
    browser.press("j")
    browser.wait(lambda: "second" in browser.texts(".message.assistant .text"))
    browser.click('[data-filter="eval"]')
    browser.wait(lambda: count(browser) == "1 group")
    assert browser.texts(f"{GROUPS} .badge") == ["held-out"]
    browser.press("j")
    browser.wait(lambda: "held out" in browser.texts(".message.assistant .text"))


def test_a_curve_shows_its_values(browser: Browser, sums: Path) -> None:
    browser.open(address(sums, find="policy/kl"))
    browser.one(".plot")
    values = {r["update"]: r["metrics"]["policy/kl"] for r in read(sums) if r["kind"] == "update"}
    browser.script("document.querySelector('.plot').focus()")
    plot = browser.one(".plot")
    plot.send_keys(Keys.ARROW_LEFT)
    browser.wait(lambda: browser.text(".readout").endswith(" at 12"))
    plot.send_keys(Keys.ARROW_LEFT)
    browser.wait(lambda: browser.text(".readout").endswith(" at 11"))
    shown = float(browser.text(".readout").split(" at ")[0])
    assert shown == pytest.approx(values[11], rel=1e-3)


def test_groups_of_a_resumed_run_count_once(rollouts: Browser) -> None:
    assert count(rollouts) == "72 groups"
    updates = rollouts.texts(f"{GROUPS} .update")
    assert updates[0] == "12"
    assert updates == sorted(updates, key=int, reverse=True)
    rollouts.click(".chips .toggle:last-child")
    rollouts.wait(lambda: count(rollouts) == "84 groups")


def test_a_group_and_its_members(rollouts: Browser, sums: Path) -> None:
    rollouts.click(f"{GROUPS}:nth-child(2)")
    rollouts.wait(lambda: len(rollouts.texts(MEMBERS)) == 8)
    key = state(rollouts)["group"]
    segment, update, _, name = key.split("/")
    outcomes = [
        record
        for record in read(sums)
        if record["kind"] == "outcome"
        and (record["segment"], record["update"], record["group"]) == (int(segment), int(update), name)
    ]
    totals = sorted((o["total"] for o in outcomes if o["total"] is not None), reverse=True)
    shown = [text for text in rollouts.texts(f"{MEMBERS} .total") if text != "–"]
    assert shown == [f"{total:.3f}" for total in totals]


def test_a_conversation(browser: Browser, tmp_path: Path) -> None:
    call = ToolCall(name="calculator", arguments={"expression": "2 + 2"}, id="c1")
    member = rollout(
        "m1",
        [
            Message(role="assistant", content="I compute.", tool_calls=(call,)),
            Message(role="tool", name="calculator", content="division by zero", is_error=True),
            "It is 4.",
        ],
        reward=Score(kind="value", value=1.0, explanation="tests passed"),
        judgement=Score(kind="value", value=0.75, explanation="terse and right"),
        total=1.75,
        step_rewards=((2, -0.5), (28, 0.25)),
        advantage=0.5,
    )
    excluded = rollout("m2", ["no"], finish="length", excluded="truncated")
    observer = Observer(tmp_path, FACTS, decode=decode, message=pytest.fail)
    observer.run(settings={"training.lr": 1e-4})
    observer.update(1, [group("g", [member, excluded], rubric="must be right")], {"reward/mean": 1.0})
    observer.close()
    browser.open(address(tmp_path, view="rollouts", group="1/1/train/g", member="m1"))
    browser.one(".outcome")
    assert browser.texts(".message h3 span:first-child") == [
        "user",
        "Rubric",
        "assistant",
        "tool · calculator",
        "assistant",
    ]
    assert browser.text(".call") == "calculatorexpression2 + 2"
    assert "tests passed" in browser.text(".scores")
    assert "terse and right" in browser.text(".scores")
    assert browser.texts(".message .badge") == ["step reward −0.5", "error", "step reward +0.25"]
    assert browser.text(".outcome .total") == "1.75"
    browser.press("l")
    browser.wait(lambda: browser.text(".outcome .why") == "Not trained: truncated")
    assert browser.text(".outcome .total") == "–"
    browser.press("3")
    browser.wait(lambda: "training.lr" in browser.text(".settings"))


@pytest.mark.parametrize("name", ["spread", "dropped", "truncated", "errors", "excluded"])
def test_filters(rollouts: Browser, sums: Path, name: str) -> None:
    rollouts.click(f'[data-filter="{name}"]')
    rollouts.wait(lambda: " of 72 groups" in count(rollouts))
    shown = int(count(rollouts).split()[0])
    assert shown == len(_matching(sums, name))
    assert 0 < shown < 72
    assert state(rollouts)["show"] == name
    rollouts.click(f'[data-filter="{name}"]')
    rollouts.wait(lambda: count(rollouts) == "72 groups")


def _matching(sums: Path, name: str) -> list[tuple[int, str]]:
    """Groups that a filter should leave, from the records."""
    groups: dict[tuple[int, str], list[dict[str, object]]] = {}
    for record in read(sums):
        if "group" in record and (record["segment"] == 2 or record["update"] < 10):
            groups.setdefault((record["update"], record["group"]), []).append(record)
    tests = {
        "spread": lambda r: False,
        "dropped": lambda r: bool(r.get("dropped")),
        "excluded": lambda r: bool(r.get("excluded")),
        "truncated": lambda r: r.get("finish") == "length",
        "errors": lambda r: (
            (r["kind"] == "outcome" and r["reward"]["kind"] == "error")
            or any(message.get("is_error") for message in r.get("messages", ()))
        ),
    }
    if name == "spread":
        return [
            key
            for key, found in groups.items()
            if len({r["total"] for r in found if r["kind"] == "outcome" and r["total"] is not None}) > 1
        ]
    return [key for key, found in groups.items() if any(tests[name](record) for record in found)]


def test_updates_and_order(rollouts: Browser) -> None:
    field = rollouts.one('[aria-label="First update"]')
    field.send_keys("5", Keys.TAB)
    rollouts.one('[aria-label="Last update"]').send_keys("6", Keys.TAB)
    rollouts.wait(lambda: count(rollouts) == "12 of 72 groups")
    assert set(rollouts.texts(f"{GROUPS} .update")) == {"5", "6"}
    rollouts.script(
        "(() => { const s = document.querySelector('.filters select'); s.value = 'high';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    rollouts.wait(lambda: state(rollouts).get("sort") == "high")
    means = [float(text) for text in rollouts.texts(f"{GROUPS} .mean")]
    assert means == sorted(means, reverse=True)


def test_search(rollouts: Browser, sums: Path) -> None:
    prompts = [r["messages"][1]["content"] for r in read(sums) if r["kind"] == "prompt"]
    rollouts.press("/")
    rollouts.driver.switch_to.active_element.send_keys(prompts[0][8:17])
    rollouts.wait(lambda: " of 72 groups" in count(rollouts))
    assert all(prompts[0][8:17] in text for text in rollouts.texts(f"{GROUPS} .excerpt"))
    rollouts.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    rollouts.press("j")
    rollouts.one(".outcome")
    rollouts.wait(lambda: rollouts.script("CSS.highlights.get('found').size") > 0)


def test_search_in_whole_texts(browser: Browser, tmp_path: Path) -> None:
    """What is at the end of a long answer is in no summary."""
    members = [rollout("a", ["word " * 400 + "needle"]), rollout("b", ["hay"])]
    observer = Observer(tmp_path, FACTS, decode=decode, message=pytest.fail)
    observer.run(settings={})
    observer.update(1, [group("g", members), group("h", [rollout("c", ["hay"])])], {})
    observer.close()
    browser.open(address(tmp_path, view="rollouts", q="NEEDLE"))
    browser.wait(lambda: count(browser) == "0 of 2 groups")
    browser.click('[data-filter="deep"]')
    browser.wait(lambda: count(browser).startswith("1 of 2 groups"))
    assert "searched 2 text files" in count(browser)


def test_keys(rollouts: Browser) -> None:
    rollouts.press("j")
    first = rollouts.wait(lambda: state(rollouts).get("group"))
    rollouts.press("j")
    rollouts.wait(lambda: state(rollouts)["group"] != first)
    rollouts.press("k")
    rollouts.wait(lambda: state(rollouts)["group"] == first)
    order = rollouts.texts(f"{MEMBERS} .name")
    rollouts.press("l", Keys.ARROW_RIGHT)
    rollouts.wait(lambda: state(rollouts)["member"] == order[2])
    rollouts.press("h", Keys.ARROW_LEFT, "h")
    rollouts.wait(lambda: state(rollouts)["member"] == order[0])
    rollouts.press("?")
    rollouts.wait(lambda: "next, previous group" in rollouts.text("dialog"))
    rollouts.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    rollouts.wait(lambda: not rollouts.text("dialog"))
    rollouts.press("d")
    theme = rollouts.script("document.documentElement.dataset.theme")
    rollouts.press("d")
    assert {theme, rollouts.script("document.documentElement.dataset.theme")} == {"dark", "light"}
    rollouts.press(Keys.ESCAPE)
    rollouts.wait(lambda: "group" not in state(rollouts))
    rollouts.press("1")
    rollouts.one(".chart")


def test_back_goes_back(rollouts: Browser) -> None:
    rollouts.press("j")
    first = rollouts.wait(lambda: state(rollouts).get("group"))
    rollouts.press("j")
    rollouts.wait(lambda: state(rollouts)["group"] != first)
    rollouts.driver.back()
    rollouts.wait(lambda: state(rollouts)["group"] == first)
    row = rollouts.one(f"{GROUPS}[aria-selected=true]")
    rollouts.wait(lambda: row.get_attribute("data-key") == first)


def test_comparing_two_members(rollouts: Browser) -> None:
    rollouts.press("j")
    rollouts.one(".outcome")
    order = rollouts.texts(f"{MEMBERS} .name")
    rollouts.press("c")
    rollouts.wait(lambda: rollouts.text(".conversation .hint") == "now choose another member")
    rollouts.press("l")
    rollouts.wait(lambda: len(rollouts.texts(".trajectory")) == 2)
    assert rollouts.texts(".trajectory h2 span") == [f"Member {order[0]}", f"Member {order[1]}"]
    assert len(rollouts.texts(".opening .user")) == 1
    link = rollouts.script("location.href")
    rollouts.press("j")  # the kept member beside one of another group: both prompts are shown
    rollouts.wait(lambda: len(rollouts.texts(".trajectory .message.user")) == 2)
    rollouts.press("c")
    rollouts.wait(lambda: len(rollouts.texts(".trajectory")) == 1)
    rollouts.open(link)
    rollouts.wait(lambda: len(rollouts.texts(".trajectory")) == 2)
    assert rollouts.texts(".trajectory h2 span") == [f"Member {order[0]}", f"Member {order[1]}"]


def test_tokens(browser: Browser, tmp_path: Path) -> None:
    turns = ["ab", Message(role="tool", content="xyz"), "c\n"]
    member = rollout("m", turns, logp=[-0.25, -3.0, -6.0, -9.0], advantage=[1.0, -0.5, 0.0, 0.25])
    observer = Observer(tmp_path, FACTS, decode=decode, message=pytest.fail)
    observer.run(settings={})
    observer.update(1, [group("g", [member])], {})
    observer.close()
    browser.open(address(tmp_path, view="rollouts", group="1/1/train/g", member="m"))
    browser.one(".outcome")
    assert browser.texts(".token") == []
    browser.press("t")
    browser.wait(lambda: browser.texts(".token") == ["a", "b", "c", "⏎\n"])
    strengths = browser.script(
        "[...document.querySelectorAll('.token')].map((e) => e.style.getPropertyValue('--strength'))"
    )
    assert strengths == ["4%", "50%", "100%", "100%"]
    browser.click(".token:nth-child(2)")
    browser.wait(lambda: "log p" in browser.text(".tip"))
    assert browser.texts(".tip dd") == ["2", "−3", "0.04979", "−0.5"]
    browser.press("t")
    browser.wait(lambda: state(browser)["tokens"] == "advantage")
    browser.wait(lambda: len(browser.texts(".token.warm")) == 3)
    assert browser.texts(".token.cool") == ["b"]
    browser.press("t")
    browser.wait(lambda: browser.texts(".token") == [])


HOSTILE = (
    '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
    "</script><svg onload='window.hacked = 3'>\u2028*/ retrogradIndex({}); \"'`${window.hacked = 4}"
)


def test_nothing_that_a_model_writes_is_run(browser: Browser, tmp_path: Path) -> None:
    """Hostile text in every place that text can be."""
    call = ToolCall(name=HOSTILE, arguments={HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}})
    bad = Score(kind="error", explanation=HOSTILE)
    member = rollout(
        HOSTILE,
        [
            Message(role="assistant", content=HOSTILE, tool_calls=(call,)),
            Message(role="tool", name=HOSTILE, content=HOSTILE),
        ],
        reward=bad,
        judgement=bad,
        excluded=HOSTILE,
        advantage=1.0,
        metrics={HOSTILE: 1.0},
    )
    made = group(
        HOSTILE,
        [member],
        prompt=HOSTILE,
        source=HOSTILE,
        rubric=HOSTILE,
        dropped=HOSTILE,
        metadata={HOSTILE: HOSTILE},
    )
    made.prompt_tokens = 2
    facts = type(FACTS)(algorithm=HOSTILE, model=HOSTILE, output=HOSTILE)
    observer = Observer(tmp_path, facts, decode=decode, message=pytest.fail)
    observer.run(settings={HOSTILE: HOSTILE})
    observer.update(1, [made], {HOSTILE: 1.0})
    observer.close()
    browser.open(address(tmp_path, metrics="all"))
    browser.wait(lambda: browser.texts(".chart h3") == [HOSTILE])
    browser.press("2", "j")
    browser.one(".outcome")
    assert HOSTILE in browser.texts(".message.assistant .text")
    assert HOSTILE in browser.texts(".message.user .text")
    browser.press("t")
    browser.wait(lambda: "".join(browser.texts(".trajectory .message.assistant .token")) == HOSTILE)
    browser.press("c", "3")
    browser.wait(lambda: HOSTILE in browser.texts(".settings dd"))
    assert browser.script("typeof window.hacked") == "undefined"
    assert browser.script("document.querySelectorAll('img, main script, svg[onload]').length") == 0
    # Even markup that got in would not run: the page's policy allows no script but its own.
    browser.script(
        "(() => { const e = document.createElement('div'); e.setAttribute('onclick', 'window.hacked = 5');"
        " document.body.append(e); e.click(); e.remove(); })()"
    )
    assert browser.script("typeof window.hacked") == "undefined"
    assert all("Content Security Policy" in error for error in browser.errors())


def test_the_page_follows_a_run(browser: Browser, tmp_path: Path) -> None:
    observer = Observer(tmp_path, FACTS, decode=decode, message=pytest.fail)
    observer.run(settings={})
    until(lambda: (tmp_path / "index.html").exists())
    browser.open(address(tmp_path, view="rollouts"))
    browser.wait(lambda: count(browser) == "0 groups")
    for update in (1, 2):
        made = [sum_group(update, index) for index in range(3)]
        observer.update(update, made, sum_metrics(update, made))
        browser.wait(lambda update=update: count(browser) == f"{3 * update} groups")
    assert browser.text(".status").startswith("update 2 ·")
    browser.press("j")
    browser.one(".outcome")
    chosen = state(browser)["group"]
    made = [sum_group(3, 0)]
    observer.update(3, made, sum_metrics(3, made))
    browser.wait(lambda: count(browser) == "7 groups")
    assert state(browser)["group"] == chosen
    assert browser.one(f"{GROUPS}[aria-selected=true]").get_attribute("data-key") == chosen
    observer.close()


def test_a_page_before_its_data_waits(browser: Browser, tmp_path: Path) -> None:
    from retrograd.observe.viewer import page_html

    (tmp_path / "index.html").write_text(page_html())
    browser.open(address(tmp_path))
    browser.wait(lambda: browser.text(".status") == "No records yet")
    record_sums(tmp_path, 1, groups=1)
    browser.wait(lambda: browser.text(".status").startswith("update 1 ·"))
    assert all("index.js" in error for error in browser.errors())  # the browser itself says so


def test_ten_thousand_rollouts(browser: Browser, tmp_path: Path) -> None:
    """The document holds what is in sight, however long the list is."""
    record_sums(tmp_path, 25, groups=50, size=8)
    browser.open(address(tmp_path, view="rollouts", sort="oldest"))
    browser.wait(lambda: count(browser) == "1,250 groups")
    nodes = browser.script("document.getElementsByTagName('*').length")
    assert nodes < 2500
    assert len(browser.texts(GROUPS)) < 40
    assert browser.texts(f"{GROUPS} .update")[0] == "1"
    browser.script("document.querySelector('.groups .virtual').scrollTo(0, 1e9)")
    browser.wait(lambda: browser.texts(f"{GROUPS} .update")[-1] == "25")
    assert browser.script("document.querySelector('.groups .row:last-child').ariaPosInSet") == "1250"
    assert browser.script("document.getElementsByTagName('*').length") < 2500
    browser.click(f"{GROUPS}:last-child")
    browser.wait(lambda: len(browser.texts(MEMBERS)) == 8)
    browser.one(".outcome")
    assert browser.script("document.getElementsByTagName('*').length") < 2500


def test_a_narrow_page_shows_one_thing_at_a_time(browser: Browser, sums: Path) -> None:
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for view in ("curves", "rollouts", "run"):
            browser.open(address(sums, view=view))
            browser.one(f".{view}")
            assert browser.script("document.documentElement.scrollWidth") == 390
        browser.open(address(sums, view="rollouts"))
        browser.click(GROUPS)
        browser.one(".outcome")
        assert browser.texts(".pane.groups") == []
        browser.click(".back")
        browser.one(".pane.groups")
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_names_for_those_who_do_not_see(rollouts: Browser) -> None:
    rollouts.press("j")
    rollouts.one(".outcome")
    unnamed = rollouts.script(
        "[...document.querySelectorAll('button, input, select, [role=listbox], [role=region]')].filter((e) =>"
        " !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).map((e) => e.outerHTML)"
    )
    assert unnamed == []
    listbox = rollouts.script(
        "document.querySelector('.groups .virtual').getAttribute('aria-activedescendant')"
    )
    assert rollouts.script("document.getElementById(arguments[0]).ariaSelected", listbox) == "true"
    ids = rollouts.script("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))


def test_served_to_a_browser(browser: Browser, sums: Path) -> None:
    server = ViewServer(sums)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        browser.open(f"{server.address}#view=rollouts")
        browser.click(GROUPS)
        browser.one(".outcome")
    finally:
        browser.driver.get("about:blank")
        server.close()
        thread.join()
