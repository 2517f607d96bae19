from headwater.pipeline.pipeline import Pipeline as Pipeline

__version__: str
