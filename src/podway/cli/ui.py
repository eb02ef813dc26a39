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
        import webbrowser

        webbrowser.open(link)
