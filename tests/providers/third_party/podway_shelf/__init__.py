"""A provider of hosts that stand on a shelf: what Podway reads before it opens it."""

from podway.provider_table import ProviderRow

ROW = ProviderRow(name="shelf", aliases=("rack",), opens="podway_shelf.provider:open_provider", place="word")
