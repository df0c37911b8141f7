//! Scratch nodes: network namespaces with NICs on a fabric of bridges.
