"""Plans and rehearsals as the API gives them. Imports the planner, which takes a while: only functions that plan import this."""

from podway.catalog.slices import Slice, find_slice
from podway.control.records import Cluster, Job
from podway.errors import UserError
from podway.hosts.blobs import BlobStore
from podway.hosts.tree import TreeManifest
from podway.model.families import known_model
from podway.model.hf import shape_from_hf
from podway.model.layout import AXES
from podway.model.shape import ModelShape
from podway.plan.network import INSIDE_OUT, place
from podway.plan.plans import TrainPlan, evaluate
from podway.plan.task_needs import command_of, settings_from, training_of
from podway.server import page_api

LARGEST_CONFIG = 1 << 20


def shape_of(name: str, config: dict[str, object] | None) -> ModelShape:
    """A model by its name, or by the config.json that came with the request."""
    if config is not None:
        return shape_from_hf(config)
    if not name:
        raise UserError("no model is given", "give a model by name, or its config.json")
    return known_model(name)


def plan_view(found: TrainPlan, tokens: float | None = None) -> page_api.PlanView:
    """One plan."""
    return page_api.PlanView(
        slice=found.slice.accelerator_type,
        topology=found.slice.topology_text,
        chips=found.chips,
        hosts=found.slice.hosts,
        mesh=str(found.mesh),
        axes={axis: found.mesh.size(axis) for axis in AXES if found.mesh.size(axis) > 1},
        boxes=_boxes(found),
        batch=found.training.batch,
        microbatches=found.training.microbatches,
        seq=found.training.seq,
        remat=str(found.training.remat),
        offload=list(found.training.offload),
        step_s=found.time.total,
        tokens_s=found.tokens_per_second,
        mfu=found.mfu,
        hourly_cost=found.dollars_per_hour,
        hours=found.hours(tokens) if tokens else None,
        cost=found.dollars(tokens) if tokens else None,
        memory=found.memory.parts,
        memory_limit=found.memory.limit,
        time=found.time.parts,
    )


def _boxes(found: TrainPlan) -> dict[str, list[int]]:
    """Where each axis lies in the torus: what an axis spans together with those inside it."""
    placed, spans, boxes = place(found.mesh, found.slice), [1] * len(found.slice.topology), {}
    for axis in INSIDE_OUT:
        group = getattr(placed, axis)
        if group.box:  # none of an axis of size 1
            spans = [have * more for have, more in zip(spans, group.box, strict=False)]
        if found.mesh.size(axis) > 1:
            boxes[axis] = list(spans)
    return boxes


def planned_reply(cluster: Cluster, job: Job, blobs: BlobStore) -> page_api.PlannedReply:
    """What the planner says of the step that a job trains; where it cannot say anything, why."""
    command = command_of(job.task)
    if command is None or command.verb != "train":
        return page_api.PlannedReply(code="not_training", note="the job runs no `podway train` that can be read")
    slice = slice_of(cluster)
    if slice is None:
        return page_api.PlannedReply(code="no_slice", note="the cluster has no TPU slice")
    slices = cluster.order.slices
    try:
        settings = settings_from(command, lambda file: _config_file(file, job, blobs))
        shape = known_model(settings.get("model.name", "tiny-llama3"))
        mesh, training = training_of(settings, slice.devices * slices, slices)
        plan = evaluate(shape, slice, mesh, training)
    except UserError as error:
        return page_api.PlannedReply(code="not_planned", note=str(error))
    classes = {
        "products": plan.time.matrix,
        "attention": plan.time.attention,
        "collectives": plan.time.ici + plan.time.dcn + plan.time.straggler,
        "other": plan.time.hbm + plan.time.relayout + plan.time.host,
    }
    return page_api.PlannedReply(plan=plan_view(plan), classes=classes, model=settings.get("model.name", "tiny-llama3"))


def slice_of(cluster: Cluster) -> Slice | None:
    """The slice type of a cluster."""
    order = cluster.order
    return find_slice(order.accelerator_type, order.topology) if order.accelerator_type else None


def _config_file(file: str, job: Job, blobs: BlobStore) -> bytes:
    """A file of the job's working directory, from what was uploaded with it."""
    wanted = file.removeprefix("./")
    for tree in job.files:
        if tree.kind == "workdir":
            for entry in TreeManifest.decode(blobs.read(tree.manifest)).entries:
                if entry.path == wanted and entry.kind == "file" and entry.size <= LARGEST_CONFIG:
                    return blobs.read(entry.sha256)
    raise UserError(f"the job trains by {file}, which is not among its files", "give the settings as key=value")
