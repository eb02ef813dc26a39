"""Cloud Storage's JSON API."""
