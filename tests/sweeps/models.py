"""Small models of many `transformers` architectures, unchanged and with random weights; one table."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from seeding import seed
from torch import Tensor, nn

import psg

N, LENGTH, VOCABULARY, SIDE = 3, 8, 37, 32

Batch = dict[str, Tensor]


class Architecture(NamedTuple):
    """One row: the name of the model's class, its configuration, and the batch that it is fed."""

    name: str
    kind: str
    model: str
    sizes: dict[str, Any]
    batch: Callable[[], Batch]

    def build(self, trains: bool = False) -> tuple[Callable, dict[str, Tensor], tuple[Any, ...]]:
        """The loss of one sample, the parameters, and a batch."""
        model, batch = self.model_and_batch()
        return *psg.stateless(model.train(trains), _criterion if len(batch) == 2 else None), batch

    def model_and_batch(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """The model, and a batch: the model's arguments, then the target if it computes no loss of its own."""
        import transformers

        transformers.logging.set_verbosity_error()
        seed()
        options = {key: value for key, value in self.sizes.items() if key.endswith("_implementation")}
        model_class = getattr(transformers, self.model)
        config = model_class.config_class(**{key: value for key, value in self.sizes.items() if key not in options})
        model = model_class._from_config(config, **options).double().eval()
        for module in model.modules():
            if isinstance(vars(module).get("dtype"), torch.dtype):  # a router that computes in float32, whatever its parameters
                module.dtype = torch.float64
        _scale(model)
        batch = self.batch()
        target = batch.pop("target", None)
        return model, (batch,) if target is None else (batch, target)


def _scale(model: nn.Module) -> None:
    """Give the random weights the size at which signals and gradients keep theirs; models of this size would start with vanishing ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=max(parameter[0].numel(), 1) ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))


def _criterion(output: Any, target: Tensor) -> Tensor:
    """A loss of the model's main output: cross entropy of its logits, or a weighted sum of what it embeds."""
    logits = getattr(output, "logits", None)
    if logits is not None and not target.is_floating_point():
        return F.cross_entropy(logits.flatten(0, -2), target.flatten())
    embedded = [value for value in output.values() if isinstance(value, Tensor) and value.is_floating_point()]
    return sum(((value.sin() * torch.arange(value.numel()).cos().reshape(value.shape)).sum() for value in embedded), 0 * target.sum())


def ids(*shape: int) -> Tensor:
    return torch.randint(4, VOCABULARY, (N, *shape))


def text() -> Batch:
    """Token-level labels, of which the first sample ignores some."""
    tokens = ids(LENGTH)
    labels = tokens.clone()
    labels[0, 3:] = -100
    return {"input_ids": tokens, "labels": labels}


def decoded() -> Batch:
    """For a loss of the logits: the models' own losses turn them to float32."""
    batch = text()
    return {"input_ids": batch["input_ids"], "target": batch["labels"]}


def padded(batch: Callable[[], Batch]) -> Callable[[], Batch]:
    mask = torch.ones(N, LENGTH, dtype=torch.int64)
    mask[0, 5:] = 0
    return lambda: batch() | {"attention_mask": mask.clone()}


def sentence() -> Batch:
    return {"input_ids": ids(LENGTH), "labels": torch.tensor([0, 1, 1])}


def translation() -> Batch:
    return {"input_ids": ids(LENGTH), "labels": ids(5)}


def image() -> Batch:
    return {"pixel_values": torch.randn(N, 3, SIDE, SIDE), "labels": torch.tensor([0, 1, 1])}


def wave() -> Batch:
    return {"input_values": torch.randn(N, 400), "labels": torch.tensor([0, 1, 1])}


def caption() -> Batch:
    return {"pixel_values": torch.randn(N, 3, SIDE, SIDE), "input_ids": ids(LENGTH), "labels": ids(LENGTH)}


def pair() -> Batch:
    return {"pixel_values": torch.randn(N, 3, SIDE, SIDE), "input_ids": ids(LENGTH), "target": torch.zeros(N)}


def among_text() -> Batch:
    """An image of 16 patches, whose places among the tokens have token 3."""
    tokens = torch.cat([torch.full((N, 16), 3), ids(LENGTH)], 1)
    return {"pixel_values": torch.randn(N, 3, SIDE, SIDE), "input_ids": tokens, "target": tokens.clone()}


BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = BERT | {"num_key_value_heads": 1, "head_dim": 8}
GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip
VIT: dict[str, Any] = {
    "image_size": SIDE, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
STAGES = {"image_size": SIDE, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
EXPERTS = {"experts_implementation": "eager"}  # the fused ones know no float64
EAGER = {"attn_implementation": "eager"}
WAV2VEC2: dict[str, Any] = BERT | {
    "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8,
}  # fmt: skip
GEMMA = LLAMA | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
TWO = {"text_config": BERT, "vision_config": VIT, "projection_dim": 8}

TABLE = [
    # text, encoder
    ("BERT", "encoder", "BertForMaskedLM", BERT, padded(text)),
    ("BERT eager", "encoder", "BertForSequenceClassification", BERT | EAGER, sentence),
    ("RoBERTa", "encoder", "RobertaForMaskedLM", BERT, padded(text)),
    ("ALBERT", "encoder, shared layers", "AlbertForMaskedLM", BERT | {"embedding_size": 8}, text),
    ("ELECTRA", "encoder", "ElectraForMaskedLM", BERT | {"embedding_size": 8}, text),
    ("DistilBERT", "encoder", "DistilBertForMaskedLM", {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2,
     "hidden_dim": 24}, text),
    ("DeBERTa-v2", "encoder", "DebertaV2ForMaskedLM", BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, text),
    ("DeBERTa", "encoder", "DebertaForMaskedLM", BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, text),
    ("MPNet", "encoder", "MPNetForMaskedLM", BERT, text),
    ("ModernBERT", "encoder", "ModernBertForMaskedLM", BERT, decoded),
    ("RoFormer", "encoder", "RoFormerForMaskedLM", BERT | {"embedding_size": 16}, text),
    ("FNet", "encoder, Fourier", "FNetForMaskedLM", BERT, text),
    ("XLNet", "encoder, relative", "XLNetLMHeadModel", {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2,
     "d_inner": 24}, text),
    ("ConvBERT", "encoder, convolutions", "ConvBertForMaskedLM", BERT | {"embedding_size": 16}, text),
    ("SqueezeBERT", "encoder, grouped convolutions", "SqueezeBertForMaskedLM", BERT | {"embedding_size": 16, "q_groups": 2,
     "k_groups": 2}, text),
    ("Longformer", "encoder, windows", "LongformerForMaskedLM", BERT | {"attention_window": 4}, text),
    ("Nystromformer", "encoder, landmarks", "NystromformerForMaskedLM", BERT | {"num_landmarks": 4, "segment_means_seq_len": LENGTH,
     "conv_kernel_size": 3}, text),
    ("YOSO", "encoder, hashed attention", "YosoForMaskedLM", BERT, padded(text)),
    ("Funnel", "encoder, pooling", "FunnelForPreTraining", {"vocab_size": VOCABULARY, "d_model": 16, "n_head": 2, "d_head": 8,
     "d_inner": 24, "block_sizes": [1, 1], "num_decoder_layers": 1}, lambda: {"input_ids": ids(LENGTH), "labels": ids(LENGTH) % 2}),
    # text, decoder
    ("GPT-2", "decoder, tied", "GPT2LMHeadModel", GPT, decoded),
    ("GPT-2 eager", "decoder, tied", "GPT2LMHeadModel", GPT | EAGER, decoded),
    ("GPT-Neo", "decoder", "GPTNeoForCausalLM", BERT | {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
     decoded),
    ("GPT-J", "decoder, rotary", "GPTJForCausalLM", GPT | {"rotary_dim": 4}, decoded),
    ("GPT-NeoX", "decoder, rotary", "GPTNeoXForCausalLM", BERT, decoded),
    ("GPT-BigCode", "decoder, multi-query", "GPTBigCodeForCausalLM", GPT, decoded),
    ("CodeGen", "decoder", "CodeGenForCausalLM", GPT | {"rotary_dim": 4, "n_head": 4}, decoded),
    ("OPT", "decoder", "OPTForCausalLM", BERT | {"ffn_dim": 24, "word_embed_proj_dim": 16}, decoded),
    ("BLOOM", "decoder, alibi", "BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2}, decoded),
    ("MPT", "decoder, alibi", "MptForCausalLM", {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 2, "n_heads": 2,
     "max_seq_len": 32}, decoded),
    ("Falcon", "decoder, multi-query", "FalconForCausalLM", BERT, decoded),
    ("Llama", "decoder, grouped queries", "LlamaForCausalLM", LLAMA, padded(decoded)),
    ("Llama eager", "decoder, grouped queries", "LlamaForCausalLM", LLAMA | EAGER, padded(decoded)),
    ("Mistral", "decoder, windows", "MistralForCausalLM", LLAMA | {"sliding_window": 4}, decoded),
    ("Qwen2", "decoder", "Qwen2ForCausalLM", LLAMA, decoded),
    ("Qwen3", "decoder", "Qwen3ForCausalLM", LLAMA, decoded),
    ("Gemma", "decoder, tied", "GemmaForCausalLM", LLAMA, decoded),
    ("Gemma-2", "decoder, soft caps", "Gemma2ForCausalLM", LLAMA, decoded),
    ("Gemma-3", "decoder", "Gemma3ForCausalLM", LLAMA, decoded),
    ("Phi", "decoder", "PhiForCausalLM", BERT, decoded),
    ("Phi-3", "decoder", "Phi3ForCausalLM", BERT, decoded),
    ("StableLM", "decoder", "StableLmForCausalLM", LLAMA, decoded),
    ("OLMo-2", "decoder", "Olmo2ForCausalLM", LLAMA, decoded),
    ("Cohere", "decoder, parallel", "CohereForCausalLM", LLAMA, decoded),
    # mixtures of experts
    ("Mixtral", "decoder, experts", "MixtralForCausalLM", LLAMA | EXPERTS | {"num_local_experts": 3}, decoded),
    ("Mixtral batched", "decoder, experts", "MixtralForCausalLM", LLAMA | {"experts_implementation": "batched_mm",
     "num_local_experts": 3}, decoded),
    ("Qwen2-MoE", "decoder, experts", "Qwen2MoeForCausalLM", LLAMA | EXPERTS | {"num_experts": 3, "num_experts_per_tok": 2,
     "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}, decoded),
    ("Qwen3-MoE", "decoder, experts", "Qwen3MoeForCausalLM", LLAMA | EXPERTS | {"num_experts": 3, "num_experts_per_tok": 2,
     "moe_intermediate_size": 8}, decoded),
    ("OLMoE", "decoder, experts", "OlmoeForCausalLM", LLAMA | EXPERTS | {"num_experts": 3, "num_experts_per_tok": 2}, decoded),
    ("Switch", "encoder-decoder, experts", "SwitchTransformersForConditionalGeneration", T5 | {"num_experts": 3,
     "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}, translation),
    # state spaces and recurrences
    ("Mamba", "state space", "MambaForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
     decoded),
    ("Mamba-2", "state space", "Mamba2ForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4,
     "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4, "expand": 2}, decoded),
    ("RecurrentGemma", "recurrent, windows", "RecurrentGemmaForCausalLM", LLAMA | {"lru_width": 16, "attention_window_size": 4,
     "block_types": ["recurrent", "attention"]}, decoded),
    ("Jamba", "state space, attention, experts", "JambaForCausalLM", LLAMA | EXPERTS | {"num_experts": 2, "attn_layer_period": 2,
     "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 2,
     "use_mamba_kernels": False}, decoded),
    # text, encoder-decoder
    ("T5", "encoder-decoder", "T5ForConditionalGeneration", T5, translation),
    ("T5 eager", "encoder-decoder", "T5ForConditionalGeneration", T5 | EAGER, translation),
    ("mT5", "encoder-decoder", "MT5ForConditionalGeneration", T5, translation),
    ("BART", "encoder-decoder", "BartForConditionalGeneration", BART, translation),
    ("BART eager", "encoder-decoder", "BartForConditionalGeneration", BART | EAGER, translation),
    ("Pegasus", "encoder-decoder", "PegasusForConditionalGeneration", BART, translation),
    ("Marian", "encoder-decoder", "MarianMTModel", BART, translation),
    ("M2M-100", "encoder-decoder", "M2M100ForConditionalGeneration", BART, translation),
    ("LED", "encoder-decoder, windows", "LEDForConditionalGeneration", BART | {"attention_window": 4,
     "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32}, translation),
    ("ProphetNet", "encoder-decoder", "ProphetNetForConditionalGeneration", {"vocab_size": VOCABULARY, "hidden_size": 16,
     "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2,
     "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32, "decoder_start_token_id": 1, "pad_token_id": 0},
     translation),
    # vision
    ("ViT", "vision", "ViTForImageClassification", VIT, image),
    ("ViT eager", "vision", "ViTForImageClassification", VIT | EAGER, image),
    ("DeiT", "vision", "DeiTForImageClassification", VIT, image),
    ("BEiT", "vision, relative", "BeitForImageClassification", VIT | {"use_relative_position_bias": True}, image),
    ("DINOv2", "vision", "Dinov2ForImageClassification", VIT, image),
    ("DINOv3", "vision, no registers", "DINOv3ViTModel", VIT | {"num_register_tokens": 0}, lambda: {"pixel_values": torch.randn(N, 3, SIDE,
     SIDE), "target": torch.zeros(N)}),
    ("Swin", "vision, windows", "SwinForImageClassification", STAGES, image),
    ("Swin-v2", "vision, windows", "Swinv2ForImageClassification", STAGES, image),
    ("ConvNeXt", "vision, convolutions", "ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
     image),
    ("ConvNeXt-v2", "vision, convolutions", "ConvNextV2ForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1],
     "num_stages": 2}, image),
    ("ResNet", "vision, convolutions", "ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
     "layer_type": "basic"}, image),
    ("RegNet", "vision, convolutions", "RegNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
     "groups_width": 4}, image),
    ("SegFormer", "vision, pyramid", "SegformerForImageClassification", {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
     "hidden_sizes": [8, 16], "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}, image),
    ("PVT-v2", "vision, pyramid", "PvtV2ForImageClassification", {"image_size": SIDE, "num_encoder_blocks": 2, "depths": [1, 1],
     "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2],
     "mlp_ratios": [2, 2]}, image),
    ("CvT", "vision, convolutions", "CvtForImageClassification", {"embed_dim": [8, 16], "depth": [1, 2], "num_heads": [1, 2],
     "patch_sizes": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1], "mlp_ratio": [2.0, 2.0], "attention_drop_rate": [0.0, 0.0],
     "drop_rate": [0.0, 0.0], "drop_path_rate": [0.0, 0.0], "qkv_bias": [True, True], "cls_token": [False, True],
     "qkv_projection_method": ["dw_bn", "dw_bn"], "kernel_qkv": [3, 3], "padding_kv": [1, 1], "stride_kv": [2, 2], "padding_q": [1, 1],
     "stride_q": [1, 1], "num_stages": 2}, image),
    ("MobileViT", "vision, convolutions", "MobileViTForImageClassification", {"image_size": SIDE, "hidden_sizes": [8, 8, 8],
     "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 16], "num_attention_heads": 2}, image),
    ("PoolFormer", "vision, pooling", "PoolFormerForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "patch_sizes": [3,
     3], "strides": [2, 2], "padding": [1, 1], "num_encoder_blocks": 2}, image),
    # vision and text
    ("CLIP", "vision and text", "CLIPModel", TWO, pair),
    ("SigLIP", "vision and text", "SiglipModel", TWO, pair),
    ("BLIP", "vision to text", "BlipForConditionalGeneration", TWO, caption),
    ("GIT", "vision to text", "GitForCausalLM", BERT | {"vision_config": VIT}, lambda: pair() | {"target": ids(LENGTH + 17)}),
    ("LLaVA", "vision among text", "LlavaForConditionalGeneration", {"text_config": LLAMA | {"model_type": "llama"}, "vision_config": VIT |
     {"model_type": "clip_vision_model"}, "image_token_index": 3}, among_text),
    ("ViLT", "vision and text", "ViltForQuestionAnswering", VIT | BERT, lambda: caption() | {"labels": torch.rand(N, 2)}),
    ("T5Gemma-2", "vision and text to text", "T5Gemma2ForConditionalGeneration", {"encoder": {"text_config": GEMMA, "vision_config": VIT,
     "mm_tokens_per_image": 4, "image_token_index": 3, "eoi_token_index": 4}, "decoder": GEMMA, "image_token_index": 3,
     "eoi_token_index": 4}, lambda: caption() | {"input_ids": torch.cat([ids(2), torch.full((N, 4), 3), ids(LENGTH)], 1)}),
    # audio
    ("Wav2Vec2", "audio", "Wav2Vec2ForSequenceClassification", WAV2VEC2, wave),
    ("HuBERT", "audio", "HubertForSequenceClassification", WAV2VEC2, wave),
    ("WavLM", "audio, relative", "WavLMForSequenceClassification", WAV2VEC2, wave),
    ("Whisper", "audio to text", "WhisperForConditionalGeneration", BART | {"num_mel_bins": 8, "max_source_positions": 10,
     "max_target_positions": 16}, lambda: {"input_features": torch.randn(N, 8, 20), "labels": ids(5)}),
    ("AST", "audio", "ASTForAudioClassification", VIT | {"max_length": 24, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8,
     "time_stride": 8}, lambda: {"input_values": torch.randn(N, 24, 16), "labels": torch.tensor([0, 1, 1])}),
    ("Speech2Text", "audio to text", "Speech2TextForConditionalGeneration", BART | {"input_feat_per_channel": 8, "conv_channels": 8,
     "max_source_positions": 40, "max_target_positions": 16}, lambda: {"input_features": torch.randn(N, 20, 8), "labels": ids(5)}),
    ("Mimi", "audio codec", "MimiModel", {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
     "head_dim": 8, "intermediate_size": 24, "num_filters": 4, "num_residual_layers": 1, "upsampling_ratios": [4, 2], "codebook_size": 16,
     "codebook_dim": 8, "vector_quantization_hidden_dimension": 8, "num_quantizers": 3, "upsample_groups": 16, "sampling_rate": 160,
     "sliding_window": 8}, lambda: {"input_values": torch.randn(N, 1, 64), "target": torch.zeros(N)}),
    # time series
    ("PatchTST", "time series", "PatchTSTForPrediction", {"num_input_channels": 2, "context_length": 16, "patch_length": 4,
     "patch_stride": 4, "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "prediction_length": 4},
     lambda: {"past_values": torch.randn(N, 16, 2), "future_values": torch.randn(N, 4, 2)}),
]  # fmt: skip


def architectures() -> list[Architecture]:
    return [Architecture(*row) for row in TABLE]
