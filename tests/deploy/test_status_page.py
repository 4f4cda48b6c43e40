"""The status page: for whoever has the address with its token, on this machine, and for reading only."""

import http.client
import json
import threading
from collections.abc import Iterator

from pytest import fixture, mark

from wardround.deploy.status_page import PAGE, StatusPage

STATE = {"server": "running", "hospitals": [{"hospital": "<b>north</b>"}], "runs": []}


@fixture(scope="module")
def page() -> Iterator[StatusPage]:
    made = StatusPage(lambda: STATE)
    threading.Thread(target=made.serve, daemon=True).start()
    yield made
    made.close()


def ask(
    page: StatusPage, path: str, method: str = "GET", **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=5)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content, answer.headers


def token(page: StatusPage) -> str:
    return page.url.partition("#")[2]


def test_the_state_needs_the_token_of_the_address(page: StatusPage) -> None:
    code, content, _ = ask(page, "/state", Authorization=f"Bearer {token(page)}")
    assert code == 200 and json.loads(content) == STATE
    for wrong in ({}, {"Authorization": f"Bearer {token(page)}x"}, {"Authorization": "Bearer \xe9"}):
        code, content, _ = ask(page, "/state", **wrong)
        assert code == 401 and "north" not in content


@mark.parametrize("host", ["evil.example.org", "127.0.0.1", "127.0.0.1:1", ""])
def test_another_host_header_is_refused_whatever_else_is_said(page: StatusPage, host: str) -> None:
    code, content, _ = ask(page, "/state", Host=host, Authorization=f"Bearer {token(page)}")
    assert code == 403 and "north" not in content


def test_the_page_loads_nothing_from_elsewhere_and_has_no_state_in_it(page: StatusPage) -> None:
    code, content, headers = ask(page, "/")
    policy = headers["Content-Security-Policy"]
    assert code == 200 and content == PAGE and token(page) not in content
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert "http" not in PAGE.replace("http-equiv", "") and "innerHTML" not in PAGE
    assert headers["Cache-Control"] == "no-store" and "Access-Control-Allow-Origin" not in headers


def test_nothing_else_is_answered(page: StatusPage) -> None:
    assert ask(page, "/../kit.json")[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(page, "/state", method, Authorization=f"Bearer {token(page)}")[0] == 501
