"""The rooms of kvlayers, and where each has what modules below it ask for by name.

To remove a kind that no other room imports, such as `recall`, remove its folder, its line in `ROOMS`, its lines in
`PROVIDED`, and its names in the public lists. What another room imports goes together with what that room does with it.
"""

from kvlayers.utils import late

ROOMS = (
    "kvlayers.core",
    "kvlayers.static",
    "kvlayers.quantized",
    "kvlayers.offload",
    "kvlayers.recurrent",
    "kvlayers.encoder_decoder",
    "kvlayers.sinks",
    "kvlayers.recall",
    "kvlayers.eviction",
    "kvlayers.interop",
    "kvlayers.rows",
    "kvlayers.memory",
    "kvlayers.planning",
)
"""Their import registers the kinds of layers, stores and caches."""

PROVIDED = {
    "static layers agree": "kvlayers.static.static_cache:share_mask_extents",
    "offloading": "kvlayers.offload.offloading:Offloading.from_options",
    "place": "kvlayers.offload.offloaded_layer:placed",
    "give way": "kvlayers.memory.steps:give_way",
    "room between passes": "kvlayers.generation.retried_pass:make_room_between",
    "pack": "kvlayers.memory.steps:pack",
    "offload": "kvlayers.memory.steps:offload",
    "onload": "kvlayers.memory.steps:onload",
    "budget": "kvlayers.memory.budget:Budget.of",
    "budget in facts": "kvlayers.memory.budget:Budget.from_facts",
    "recurrent kinds": "kvlayers.recurrent.hybrid_layer:recurrent_kinds",
    "separate rows": "kvlayers.rows.rows_layer:SeparateRows",
    "dense rows": "kvlayers.rows.dense_rows:DenseRows",
    "recurrent rows": "kvlayers.rows.recurrent_rows:RecurrentRows",
    "recall": "kvlayers.recall.recall_layer:Recall.of",
    "recall in facts": "kvlayers.recall.recall_layer:Recall.from_facts",
    "adapter": "kvlayers.interop.adapter:TransformersLayer",
    "DynamicCache": "kvlayers.core.dynamic_cache:DynamicCache",
    "explain": "kvlayers.serving.reports:explained",
    "pin": "kvlayers.serving.sessions:pin_of",
    "session": "kvlayers.serving.sessions:session_of",
    "import of a session": "kvlayers.serving.sessions:import_session",
    "listener": "kvlayers.serving.events:Announcer",
    "room for rows": "kvlayers.planning.auto:RoomForRows",
    "init_continuous_batching": "kvlayers.batching.continuous_batching:init_continuous_batching",
    "destroy_cached_continuous_batching_manager": "kvlayers.batching.continuous_batching:destroy_kept_manager",
}

late.provide(ROOMS, PROVIDED)
