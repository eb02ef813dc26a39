"""Where Google Cloud's regions are, so that of two zones at one price the nearer is taken."""

import math

# Degrees north and east of the places that Google, "Regions and zones", names for each region.
_WHERE = {
    "africa-south1": (-26.2, 28.0),
    "asia-east1": (24.1, 120.5),
    "asia-east2": (22.3, 114.2),
    "asia-northeast1": (35.7, 139.7),
    "asia-northeast2": (34.7, 135.5),
    "asia-northeast3": (37.6, 127.0),
    "asia-south1": (19.1, 72.9),
    "asia-south2": (28.6, 77.2),
    "asia-southeast1": (1.4, 103.8),
    "asia-southeast2": (-6.2, 106.8),
    "australia-southeast1": (-33.9, 151.2),
    "australia-southeast2": (-37.8, 145.0),
    "europe-central2": (52.2, 21.0),
    "europe-north1": (60.6, 27.2),
    "europe-north2": (59.3, 18.1),
    "europe-southwest1": (40.4, -3.7),
    "europe-west1": (50.4, 3.8),
    "europe-west2": (51.5, -0.1),
    "europe-west3": (50.1, 8.7),
    "europe-west4": (53.4, 6.8),
    "europe-west6": (47.4, 8.5),
    "europe-west8": (45.5, 9.2),
    "europe-west9": (48.9, 2.4),
    "europe-west10": (52.5, 13.4),
    "europe-west12": (45.1, 7.7),
    "me-central1": (25.3, 51.5),
    "me-central2": (26.4, 50.1),
    "me-west1": (32.1, 34.8),
    "northamerica-northeast1": (45.5, -73.6),
    "northamerica-northeast2": (43.7, -79.4),
    "northamerica-south1": (20.6, -100.4),
    "southamerica-east1": (-23.5, -46.6),
    "southamerica-west1": (-33.4, -70.7),
    "us-central1": (41.2, -95.9),
    "us-central2": (36.3, -95.3),
    "us-east1": (33.2, -80.0),
    "us-east4": (39.0, -77.5),
    "us-east5": (40.0, -83.0),
    "us-south1": (32.8, -96.8),
    "us-west1": (45.6, -121.2),
    "us-west2": (34.1, -118.2),
    "us-west3": (40.8, -111.9),
    "us-west4": (36.2, -115.1),
}
EARTH_RADIUS_KM = 6371.0


def is_region(name: str) -> bool:
    """Whether Google Cloud has such a region."""
    return name in _WHERE


def regions() -> tuple[str, ...]:
    """All of them."""
    return tuple(_WHERE)


def distance_km(one: str, other: str) -> float:
    """Between two regions, along the ground; infinite where either is not known."""
    if one not in _WHERE or other not in _WHERE:
        return 0.0 if one == other else math.inf
    (north, east), (other_north, other_east) = (tuple(map(math.radians, _WHERE[name])) for name in (one, other))
    half = math.sin((north - other_north) / 2) ** 2
    half += math.cos(north) * math.cos(other_north) * math.sin((east - other_east) / 2) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(math.sqrt(half))
