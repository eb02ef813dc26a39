"""Who somebody is while they ask for nothing, for what the server starts in their name."""

from pathlib import Path

from podway.control.store import open_store, sqlite_url
from podway.server.tokens import TokenCache


def test_a_person_is_what_their_valid_tokens_allow(tmp_path: Path) -> None:
    people = open_store(sqlite_url(tmp_path / "p.db")).people
    cache = TokenCache(people, "local", "ann")

    def role(user: str) -> str | None:
        cache.reload()
        found = cache.person(user)
        return found and found.role

    assert role("ann") == "admin" and role("bob") is None
    people.add_token("bob", role="viewer")
    people.add_token("bob", role="gateway")
    people.add_token("bob", role="admin", lifetime_s=-1)
    assert role("bob") is None
    people.add_token("bob", role="member")
    people.set_member("lm", "bob", "member")
    assert role("bob") == "member"
    found = cache.person("bob")
    assert found is not None and found.projects == {"lm": "member"}
    people.revoke("bob")
    assert role("bob") is None
