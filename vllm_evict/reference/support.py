"""Where a model's attention is, and which models the reference does not fit."""

from __future__ import annotations

from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils.output_capturing import OutputRecorder


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention module of each layer, in order.

    transformers itself finds them for ``output_attentions`` by the class in ``can_record_outputs``.

    Raises:
        ValueError: not eager attention, or not a decoder whose layers all keep every token.

    """
    name, config = type(model).__name__, model.config
    own_layers = DynamicCache(config=config).layers
    if config.is_encoder_decoder or any(type(layer) is not DynamicLayer for layer in own_layers):
        raise ValueError(
            f"{name} has layers without a full-length cache (sliding window, state space or cross attention); the "
            "reference evicts from all layers alike. Use a decoder-only model with full attention."
        )
    recorded = model.base_model.can_record_outputs.get("attentions")
    wanted = recorded.target_class if isinstance(recorded, OutputRecorder) else recorded
    modules = [module for module in model.modules() if isinstance(wanted, type) and isinstance(module, wanted)]
    modules.sort(key=lambda module: module.layer_idx)
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    if [module.layer_idx for module in modules] != list(range(num_layers)):
        raise ValueError(f"{name}: found {len(modules)} attention modules in {num_layers} layers, wanted one in each")
    for module in modules:
        check_eager(module)
    return modules


def check_eager(attention: nn.Module) -> None:
    """ValueError unless the module computes attention weights."""
    implementation = attention.config._attn_implementation
    if implementation != "eager":
        raise ValueError(
            f"attn_implementation={implementation!r} computes no attention weights, and the cache needs them. "
            "Load the model with from_pretrained(..., attn_implementation='eager') or call "
            "model.set_attn_implementation('eager')."
        )
