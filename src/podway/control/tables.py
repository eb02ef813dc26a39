"""The tables, in SQLAlchemy Core so that SQLite and PostgreSQL run the same statements.

A cluster's and a job's changing parts are columns where they are searched or guarded, and one JSON `body` otherwise.
`live_name` is unique and NULL once a cluster is gone: a name is taken exactly as long as something of it lives.
These are the tables of the newest schema; `migrations.py` brings older databases to it, and counts schemas.
"""

import sqlalchemy as sa

meta = sa.MetaData()
READ_ONLY = {"podway_read_only": True}  # execution options of a connection that takes no write lock (store.py)

info = sa.Table("podway_info", meta, sa.Column("key", sa.String, primary_key=True), sa.Column("value", sa.String))

clusters = sa.Table(
    "clusters",
    meta,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False, index=True),
    sa.Column("live_name", sa.String, unique=True),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("created", sa.Float, nullable=False, index=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("owner", sa.String),
    sa.Column("lease_until", sa.Float, nullable=False, default=0.0),
    sa.Column("next_job", sa.Integer, nullable=False, default=1),
    sa.Column("body", sa.LargeBinary, nullable=False),
)

jobs = sa.Table(
    "jobs",
    meta,
    sa.Column("cluster_id", sa.String, sa.ForeignKey("clusters.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("open", sa.Boolean, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("request_id", sa.String),  # a request sent twice (its answer was lost) makes one job
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("jobs_open", "cluster_id", "open"),
    sa.UniqueConstraint("cluster_id", "request_id"),
)

events = sa.Table(
    "events",
    meta,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("cluster_id", sa.String, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("events_cluster", "cluster_id", "id"),
)

# How tries to get hosts went, by place; what it says fades (control/failover.py).
tries = sa.Table(
    "tries",
    meta,
    sa.Column("provider", sa.String, primary_key=True),
    sa.Column("accelerator_type", sa.String, primary_key=True),
    sa.Column("zone", sa.String, primary_key=True),
    sa.Column("spot", sa.Boolean, primary_key=True),
    sa.Column("good", sa.Float, nullable=False),
    sa.Column("bad", sa.Float, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
)

tokens = sa.Table(
    "tokens",
    meta,
    sa.Column("digest", sa.String, primary_key=True),
    sa.Column("user", sa.String, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("role", sa.String, nullable=False),
    sa.Column("expires", sa.Float),
)

members = sa.Table(
    "members",
    meta,
    sa.Column("project", sa.String, primary_key=True),
    sa.Column("user", sa.String, primary_key=True),
    sa.Column("role", sa.String, nullable=False),
)

# Who did what: every request that changes something, refused ones too.
audit = sa.Table(
    "audit",
    meta,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("user", sa.String, nullable=False),
    sa.Column("token", sa.String, nullable=False),
    sa.Column("address", sa.String, nullable=False),
    sa.Column("action", sa.String, nullable=False),
    sa.Column("target", sa.String, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
)

# Services, as clusters: what is searched or guarded is a column, the rest one JSON body.
services = sa.Table(
    "services",
    meta,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False, index=True),
    sa.Column("live_name", sa.String, unique=True),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("owner", sa.String),
    sa.Column("lease_until", sa.Float, nullable=False, default=0.0),
    sa.Column("next_replica", sa.Integer, nullable=False, default=1),
    sa.Column("body", sa.LargeBinary, nullable=False),
)

replicas = sa.Table(
    "replicas",
    meta,
    sa.Column("service_id", sa.String, sa.ForeignKey("services.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("open", sa.Boolean, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("replicas_open", "service_id", "open"),
)

gateways = sa.Table(
    "gateways",
    meta,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("url", sa.String, nullable=False),
    sa.Column("seen", sa.Float, nullable=False),
    sa.Column("sequence", sa.BigInteger, nullable=False),
)

# What gateways saw lately, by service; the autoscaler reads it, and old rows go.
loads = sa.Table(
    "loads",
    meta,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("service", sa.String, nullable=False),
    sa.Column("gateway", sa.String, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("loads_service", "service", "at"),
)

usage = sa.Table(
    "usage",
    meta,
    sa.Column("day", sa.String, primary_key=True),
    sa.Column("user", sa.String, primary_key=True),
    sa.Column("service", sa.String, primary_key=True),
    sa.Column("model", sa.String, primary_key=True),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
)

# Keys that open services and nothing else, with their limits (gateway_keys.py).
gateway_keys = sa.Table(
    "gateway_keys",
    meta,
    sa.Column("digest", sa.String, primary_key=True),
    sa.Column("user", sa.String, nullable=False),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("expires", sa.Float),
    sa.Column("services", sa.String),  # JSON; NULL: all
    sa.Column("requests_per_minute", sa.Float),
    sa.Column("tokens_per_day", sa.BigInteger),
    sa.UniqueConstraint("user", "name"),
)

# Disks that outlive clusters, kept by `volumes.py`.
volumes = sa.Table(
    "volumes",
    meta,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)

# Runs to start at given times, kept by `schedules.py`; `next_at` is when the next one is due.
schedules = sa.Table(
    "schedules",
    meta,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("next_at", sa.Float, nullable=False, index=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)

# Pools of workers, kept by `pools.py`, and the jobs that wait for one of a pool or have one.
pools = sa.Table(
    "pools",
    meta,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False, unique=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)

pool_jobs = sa.Table(
    "pool_jobs",
    meta,
    sa.Column("pool_id", sa.String, sa.ForeignKey("pools.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("open", sa.Boolean, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("pool_jobs_open", "pool_id", "open"),
)

# Jobs that run together, kept by `job_groups.py`.
job_groups = sa.Table(
    "job_groups",
    meta,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)
