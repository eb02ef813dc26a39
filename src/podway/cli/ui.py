"""`podway ui`: the web page, opened with a link that logs in once."""

import click

from podway.server.client import Client


@click.command(name="ui")
@click.option("--no-browser", is_flag=True, help="Only print the link.")
def command(no_browser: bool) -> None:
    """Open the web page: clusters, jobs, logs, plans and costs.

    The link that it prints works once, within two minutes, for this server; the page stays logged in for 12 hours.
    """
    link = Client().page_link()
    click.echo(link)
    if not no_browser:
        open_page(link)


def open_page(link: str) -> None:
    """In a browser, by way of a file that is ours alone: other users of the machine can see the arguments of a browser."""
    import webbrowser
    from html import escape

    from podway.files import write_atomically
    from podway.home import home

    file = home() / "open.html"
    page = (
        f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(link, quote=True)}"><title>Podway</title>'
    )
    write_atomically(file, page.encode(), mode=0o600)
    webbrowser.open(file.as_uri())
