import subprocess
import sys


def test_the_facts_about_models_import_no_jax() -> None:
    modules = ("shape", "families", "hf", "params", "layout", "flops")
    program = "; ".join(f"import podway.model.{name}" for name in modules)
    program += "; import sys; assert not {'jax', 'numpy'} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
