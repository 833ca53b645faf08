"""Layouts that cut weights and activations along several dimensions: 2d, 2.5d and 3d.

shape               how tensors lie on a grid of processes, as arithmetic
summa, cubic        products of matrices in blocks on a grid of q x q or l x l x l processes
grid                the axes of a grid, and what layers do along them
layout, layers      the form of each layer on a grid
norms               norms of activations whose features are cut
traffic             bytes that processes of a grid send
"""
