"""Models of graphs and point clouds."""

import torch

from research.plain_models.registry import Built, called, plain_model, simple

EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 2], [1, 2, 3, 4, 5, 6, 0, 3, 5]])


@plain_model("torch-geometric", "graph", name="TransformerConv")
def transformer_conv() -> Built:
    """Attention over neighbours, with a softmax of its own over edges."""
    from torch_geometric.nn import TransformerConv

    return simple(TransformerConv(15, 6, heads=3), torch.randn(7, 15), EDGES)


@plain_model("torch-geometric", "graph", name="GATv2Conv")
def gat() -> Built:
    """Attention over neighbours by added scores."""
    from torch_geometric.nn import GATv2Conv

    return simple(GATv2Conv(15, 6, heads=3), torch.randn(7, 15), EDGES)


@plain_model("torch-geometric", "graph", name="GPSConv")
def gps() -> Built:
    """Messages and full attention between the nodes of a graph."""
    from torch_geometric.nn import GCNConv, GPSConv

    model = GPSConv(18, GCNConv(18, 18), heads=3)
    return simple(model, torch.randn(7, 18), EDGES, batch=torch.zeros(7, dtype=torch.long))


@plain_model("torch-geometric", "graph", name="SetTransformerAggregation")
def set_transformer() -> Built:
    """Attention to the nodes of each graph, then of learned seeds."""
    from torch_geometric.nn.aggr import SetTransformerAggregation

    x, of_equal_size = torch.randn(8, 18), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    alone = [(x[:4], of_equal_size[:4]), (x[4:7], of_equal_size[:3])]
    return Built(
        SetTransformerAggregation(18, num_seed_points=2, heads=3),
        (called(x, of_equal_size), called(x[:7], of_equal_size[:7], case="padded graph", alone=alone)),
        cross=("pma",),
    )


@plain_model("torch-geometric", "graph", name="SGFormer attention")
def sgformer() -> Built:
    """Linear attention without a softmax."""
    from torch_geometric.nn.attention import SGFormerAttention

    return simple(SGFormerAttention(18, heads=3, head_channels=6), torch.randn(2, 7, 18))


@plain_model("graph-transformer-pytorch", "graph")
def graph_transformer() -> Built:
    """Attention between nodes with features of edges in keys and values."""
    from graph_transformer_pytorch import GraphTransformer

    return simple(
        GraphTransformer(dim=18, depth=2, edge_dim=7, heads=3, dim_head=6),
        torch.randn(2, 5, 18),
        torch.randn(2, 5, 5, 7),
    )


@plain_model("se3-transformer-pytorch", "graph")
def se3() -> Built:
    """Attention over neighbours of points."""
    from se3_transformer_pytorch import SE3Transformer

    model = SE3Transformer(dim=6, heads=2, depth=1, dim_head=3, num_degrees=2, num_neighbors=4)
    return simple(model, torch.randn(1, 7, 6), torch.randn(1, 7, 3), torch.ones(1, 7, dtype=torch.bool))


@plain_model("point-transformer-pytorch", "graph")
def point_transformer() -> Built:
    """One weight for each feature."""
    from point_transformer_pytorch import PointTransformerLayer

    return simple(
        PointTransformerLayer(dim=18, pos_mlp_hidden_dim=7, attn_mlp_hidden_mult=2),
        torch.randn(2, 5, 18),
        torch.randn(2, 5, 3),
    )


@plain_model("molecule-attention-transformer", "graph")
def molecule() -> Built:
    """Softmax mixed with distances and adjacency."""
    from molecule_attention_transformer import MAT

    model = MAT(dim_in=14, dim_out=5, model_dim=18, depth=1, heads=3)
    adjacency = torch.empty(2, 5, 5).random_(2).bool()
    return simple(
        model,
        torch.randn(2, 5, 14),
        adjacency_mat=adjacency,
        distance_mat=torch.randn(2, 5, 5),
        mask=torch.ones(2, 5, dtype=torch.bool),
    )


@plain_model("invariant-point-attention", "graph")
def invariant_points() -> Built:
    """Weights that average values and points."""
    from invariant_point_attention import InvariantPointAttention

    model = InvariantPointAttention(
        dim=18, heads=3, scalar_key_dim=6, scalar_value_dim=6, point_key_dim=4, point_value_dim=4, pairwise_repr_dim=7
    )
    rotations = torch.eye(3).expand(2, 5, 3, 3).clone()
    return simple(
        model,
        torch.randn(2, 5, 18),
        torch.randn(2, 5, 5, 7),
        rotations=rotations,
        translations=torch.randn(2, 5, 3),
        mask=torch.ones(2, 5, dtype=torch.bool),
    )
