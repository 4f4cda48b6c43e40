"""project.yaml and site.yaml as tired people write them: what is refused, and with which words."""

from pathlib import Path

from pytest import LogCaptureFixture, mark, raises

from wardround.deploy.kits.project import load_project
from wardround.deploy.site_file import load_site
from wardround.errors import ConfigError

SMALLEST = "project: demo\norganiser: {host: a.example.org}\nhospitals: [north]\n"


def told(path: Path, text: str | bytes, load: object = load_project) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with raises(ConfigError) as error:
        load(path)  # type: ignore[operator]
    assert str(error.value).startswith(str(path)) and len(str(error.value)) < 600
    return str(error.value)


def test_a_rule_that_is_written_twice_is_refused_instead_of_half_obeyed(tmp_path: Path) -> None:
    text = "data: federation.yaml\ntasks: [evaluate]\ndevice: cpu\ntasks: all\n"

    found = told(tmp_path / "site.yaml", text, load_site)

    assert "line 4: tasks is set before, in line 2. Keep one of them." in found


def test_keys_may_repeat_in_different_places(tmp_path: Path) -> None:
    path = tmp_path / "project.yaml"
    path.write_text(SMALLEST.replace("[north]", "[{name: a, organisation: X}, {name: b, organisation: X}]"))

    assert [hospital.name for hospital in load_project(path).hospitals] == ["a", "b"]
    assert "line 3: name is set before" in told(path, SMALLEST.replace("[north]", "[{name: a, name: b}]"))


def test_a_file_far_too_large_is_not_even_parsed(tmp_path: Path) -> None:
    found = told(tmp_path / "project.yaml", SMALLEST + "# filler\n" * 200_000)

    assert "is 1.8 MB, too large for a file with settings like 'project: my-project'" in found


@mark.parametrize(
    ("text", "words"),
    [
        ("- north\n", "expected settings like 'project: my-project', found a list"),
        ("north\n", "found a plain value"),
        (b"\xff\xfe\x00north", "cannot be read"),
        ("project: [\n", "line 2"),
        ("", "project is missing"),
        (SMALLEST.replace("[north]", "north"), "hospitals: found 'north'; give a list of 1 to 1000 names"),
        (SMALLEST.replace("[north]", ""), "hospitals: found None; give a list"),
        (SMALLEST.replace("[north]", "[]"), "hospitals: found 0 entries"),
        (SMALLEST.replace("[north]", f"{list(range(1001))}"), "hospitals: found 1001 entries"),
        (SMALLEST.replace("[north]", "[no]"), "hospitals.0: False is not a name"),
        (SMALLEST.replace("[north]", "[12]"), "quote one that YAML takes for something else"),
        (SMALLEST.replace("{host: a.example.org}", "a.example.org"), "a section with keys of its own"),
        (SMALLEST.replace("{host: a.example.org}", "{hots: a.example.org}"), "Did you mean 'host'?"),
        (SMALLEST.replace("a.example.org", "10.0.0.777"), "'10.0.0.777' is not a host"),
        (SMALLEST.replace("org}", "org, port: yes}"), "organiser.port: it is true; give a number"),
        (SMALLEST + "valid_days: on\n", "valid_days: it is true; give a number"),
    ],
)
def test_a_careless_project_is_one_sentence_in_our_words(
    text: str | bytes, words: str, tmp_path: Path
) -> None:
    found = told(tmp_path / "project.yaml", text)

    assert words in found
    assert not any(jargon in found for jargon in ("tuple", "Tuple", "dictionary", "instance of"))


def test_a_key_that_is_no_longer_used_is_said_and_passed_over(
    tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    path = tmp_path / "project.yaml"
    path.write_text(SMALLEST.replace("org}", "org, admin_port: 8003}"))

    assert load_project(path).organiser.port == 8002
    assert caplog.messages == [
        f"{path}: organiser.admin_port is no longer used and was ignored; delete the line."
    ]


def test_a_bomb_of_aliases_does_not_go_off(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]

    assert "is not a setting" in told(tmp_path / "site.yaml", "\n".join(lines) + "\n", load_site)


@mark.parametrize("line", ["threads: yes", "min_cases: true", "version: yes"])
def test_yes_is_not_a_number_in_site_yaml(line: str, tmp_path: Path) -> None:
    assert "it is true; give a number" in told(tmp_path / "site.yaml", line + "\n", load_site)
